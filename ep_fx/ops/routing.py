"""permute and unpermute: token rows into expert order and, weighted by the router, back.

    x[T,D], topk_ids[T,K]  ->  rows[T*K,D] sorted by expert, tokens_per_expert[E], permuted_indices[T*K]
    rows[i] = x[permuted_indices[i] // K]           y[t] = sum over k of topk_weights[t,k] * row of (t,k)

The sort is stable. An id equal to `num_experts` means 'no expert': its rows come last and are not counted. Sums over k
are kept in fp32 for bf16 and fp16 rows (fp32 1.0 + 2**-10 gives 1.0009765625); `y` has the dtype of `rows`, the
gradient of `topk_weights` theirs. No kernel here waits for the device.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_fx.ops.library import accumulation_dtype, inverse_permutation, no_grads, register


def _check_ids(ids: Tensor, num_experts: int) -> None:
    if ids.numel() == 0:
        return
    inside = ((ids >= 0) & (ids <= num_experts)).all()
    message = f"ep_fx.permute: topk_ids must lie in 0..{num_experts} ({num_experts} means 'no expert')"
    if ids.device.type != "cpu":
        torch._assert_async(inside, message)
    elif not inside:
        raise ValueError(f"{message}, got values from {int(ids.min())} to {int(ids.max())}")


def _permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = topk_ids.reshape(-1).long()
    _check_ids(ids, num_experts)
    permuted_indices = torch.argsort(ids, stable=True)
    counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    rows = x.index_select(0, permuted_indices // max(topk_ids.shape[1], 1))
    return rows, counts[:num_experts].clone(), permuted_indices


def _permute_fake(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    count = topk_ids.shape[0] * topk_ids.shape[1]
    indices = topk_ids.new_empty([count], dtype=torch.int64)
    return x.new_empty([count, x.shape[1]]), topk_ids.new_empty([num_experts], dtype=torch.int64), indices


def _permute_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, topk_ids, _ = inputs
    _, tokens_per_expert, permuted_indices = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(tokens_per_expert, permuted_indices)
    ctx.save_for_backward(permuted_indices)
    ctx.num_tokens, ctx.top_k = x.shape[0], topk_ids.shape[1]


def _permute_formula(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
    if grad is None:
        return no_grads(3)
    (permuted_indices,) = ctx.saved_tensors
    return torch.ops.ep_fx.permute_backward(grad, permuted_indices, ctx.num_tokens, ctx.top_k), None, None


def _permute_backward(grad: Tensor, permuted_indices: Tensor, num_tokens: int, top_k: int) -> Tensor:
    by_token = grad.index_select(0, inverse_permutation(permuted_indices))
    return by_token.view(num_tokens, top_k, grad.shape[1]).sum(1)


def _permute_backward_fake(grad: Tensor, permuted_indices: Tensor, num_tokens: int, top_k: int) -> Tensor:
    return grad.new_empty([num_tokens, grad.shape[1]])


def _unpermute(rows: Tensor, permuted_indices: Tensor, topk_weights: Tensor) -> Tensor:
    tokens, top_k = topk_weights.shape
    dtype = accumulation_dtype(rows, topk_weights)
    position = inverse_permutation(permuted_indices).view(tokens, top_k)
    total = rows.new_zeros((tokens, rows.shape[1]), dtype=dtype)
    for k in range(top_k):
        total.addcmul_(rows.index_select(0, position[:, k]).to(dtype), topk_weights[:, k : k + 1].to(dtype))
    return total.to(rows.dtype)


def _unpermute_fake(rows: Tensor, permuted_indices: Tensor, topk_weights: Tensor) -> Tensor:
    return rows.new_empty([topk_weights.shape[0], rows.shape[1]])


def _unpermute_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_formula(ctx: Any, grad: Tensor) -> Any:
    grad_rows, grad_weights = torch.ops.ep_fx.unpermute_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


def _unpermute_backward(
    grad: Tensor, rows: Tensor, permuted_indices: Tensor, topk_weights: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(rows, topk_weights)
    by_row = grad.index_select(0, permuted_indices // max(topk_weights.shape[1], 1)).to(dtype)
    grad_weights = topk_weights.new_empty(permuted_indices.shape[0])
    grad_weights[permuted_indices] = (by_row * rows).sum(1).to(topk_weights.dtype)
    row_weights = topk_weights.reshape(-1).index_select(0, permuted_indices).to(dtype)
    grad_rows = by_row.mul_(row_weights.unsqueeze(1)).to(rows.dtype)
    return grad_rows, grad_weights.view(topk_weights.shape)


def _unpermute_backward_fake(
    grad: Tensor, rows: Tensor, permuted_indices: Tensor, topk_weights: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), topk_weights.new_empty(topk_weights.shape)


register(
    "permute(Tensor x, Tensor topk_ids, int num_experts) -> "
    "(Tensor rows, Tensor tokens_per_expert, Tensor permuted_indices)",
    _permute, _permute_fake, setup_context=_permute_setup, backward=_permute_formula,
)
register(
    "permute_backward(Tensor grad, Tensor permuted_indices, SymInt num_tokens, int top_k) -> Tensor",
    _permute_backward, _permute_backward_fake,
)
register(
    "unpermute(Tensor rows, Tensor permuted_indices, Tensor topk_weights) -> Tensor",
    _unpermute, _unpermute_fake, setup_context=_unpermute_setup, backward=_unpermute_formula,
)
register(
    "unpermute_backward(Tensor grad, Tensor rows, Tensor permuted_indices, Tensor topk_weights) -> "
    "(Tensor grad_rows, Tensor grad_weights)",
    _unpermute_backward, _unpermute_backward_fake,
)
