"""dispatch and combine as single nodes: the exchange of an MoE region before it is lowered.

    routed_input[R,D] = dispatch(x[N,D])      combine(routed_output[R,D]) = y[N,D], rows that were not sent are 0

R, the number of rows that arrive, is an unbacked size: lowering never changes a shape. The kernels run a region whose
experts are all local (ep_size 1: every counted row arrives, in the order it has); more ranks need the expert-parallel
pass. The context of a region (permuted_indices, splits) consists of results of dispatch. No result shares memory with
an argument.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_fx.ops.library import no_grads, register


def _require_local(ep_size: int, op: str, region: str) -> None:
    if ep_size != 1:
        raise RuntimeError(
            f"ep_fx.{op} of region {region!r} spans {ep_size} ranks: it must be lowered by the expert-parallel pass"
        )


def _dispatch(
    x: Tensor, tokens_per_expert: Tensor, weights: Tensor | None, ep_size: int, region: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _require_local(ep_size, "dispatch", region)
    received = int(tokens_per_expert.sum())
    if received > x.shape[0]:
        raise ValueError(f"ep_fx.dispatch of region {region!r}: {received} tokens are counted, x has {x.shape[0]} rows")
    routed = x[:received].clone(memory_format=torch.contiguous_format)
    routed_weights = x.new_empty(0) if weights is None else weights[:received].clone()
    indices = torch.arange(received, device=x.device)
    splits = torch.full((2, 1), received, device=x.device)
    return routed, routed_weights, tokens_per_expert.to(torch.int64, copy=True), indices, splits


def _dispatch_fake(
    x: Tensor, tokens_per_expert: Tensor, weights: Tensor | None, ep_size: int, region: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    received = torch.library.get_ctx().new_dynamic_size()
    routed_weights = x.new_empty([0]) if weights is None else weights.new_empty([received])
    counts = tokens_per_expert.new_empty([tokens_per_expert.shape[0] // ep_size], dtype=torch.int64)
    indices = tokens_per_expert.new_empty([received], dtype=torch.int64)
    splits = tokens_per_expert.new_empty([2, ep_size], dtype=torch.int64)
    return x.new_empty([received, *x.shape[1:]]), routed_weights, counts, indices, splits


def _dispatch_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, weights, _, region = inputs
    routed, routed_weights, counts, indices, splits = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(counts, indices, splits, *([routed_weights] if weights is None else []))
    ctx.save_for_backward(indices, splits)
    ctx.num_rows, ctx.row_shape, ctx.region = x.shape[0], x.shape[1:], region
    ctx.dtype, ctx.device = routed.dtype, routed.device


def _dispatch_formula(ctx: Any, grad: Tensor | None, grad_weights: Tensor | None, *_: Any) -> Any:
    if grad is None and grad_weights is None:
        return no_grads(5)
    indices, splits = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros([indices.shape[0], *ctx.row_shape], dtype=ctx.dtype, device=ctx.device)
    grad_x, grad_w = torch.ops.ep_fx.dispatch_backward(
        grad, grad_weights, indices, splits, ctx.num_rows, ctx.region
    )
    return grad_x, None, None if grad_weights is None else grad_w, None, None


def _return_rows(rows: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """A new tensor of `num_rows` rows: ``rows[i]`` at ``indices[i]``, zeros behind the last of them."""
    result = rows.new_empty((num_rows, *rows.shape[1:]))
    result[indices] = rows
    result[indices.shape[0] :] = 0
    return result


def _dispatch_backward(
    grad: Tensor, grad_weights: Tensor | None, permuted_indices: Tensor, splits: Tensor, num_rows: int, region: str
) -> tuple[Tensor, Tensor]:
    _require_local(splits.shape[1], "dispatch_backward", region)
    grad_x = _return_rows(grad, permuted_indices, num_rows)
    if grad_weights is None:
        return grad_x, grad.new_empty(0)
    return grad_x, _return_rows(grad_weights, permuted_indices, num_rows)


def _dispatch_backward_fake(
    grad: Tensor, grad_weights: Tensor | None, permuted_indices: Tensor, splits: Tensor, num_rows: int, region: str
) -> tuple[Tensor, Tensor]:
    weights = grad.new_empty([0]) if grad_weights is None else grad_weights.new_empty([num_rows])
    return grad.new_empty([num_rows, *grad.shape[1:]]), weights


def _combine(routed_output: Tensor, permuted_indices: Tensor, splits: Tensor, num_rows: int, region: str) -> Tensor:
    _require_local(splits.shape[1], "combine", region)
    return _return_rows(routed_output, permuted_indices, num_rows)


def _combine_fake(
    routed_output: Tensor, permuted_indices: Tensor, splits: Tensor, num_rows: int, region: str
) -> Tensor:
    return routed_output.new_empty([num_rows, *routed_output.shape[1:]])


def _combine_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, indices, splits, _, ctx.region = inputs
    ctx.save_for_backward(indices, splits)


def _combine_formula(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.ep_fx.combine_backward(grad, *ctx.saved_tensors, ctx.region), *no_grads(4)


def _combine_backward(grad: Tensor, permuted_indices: Tensor, splits: Tensor, region: str) -> Tensor:
    _require_local(splits.shape[1], "combine_backward", region)
    return grad.index_select(0, permuted_indices)


def _combine_backward_fake(grad: Tensor, permuted_indices: Tensor, splits: Tensor, region: str) -> Tensor:
    return grad.new_empty([permuted_indices.shape[0], *grad.shape[1:]])


register(
    "dispatch(Tensor x, Tensor tokens_per_expert, Tensor? weights, int ep_size, str region) -> (Tensor routed_input, "
    "Tensor routed_weights, Tensor tokens_per_expert, Tensor permuted_indices, Tensor splits)",
    _dispatch, _dispatch_fake, setup_context=_dispatch_setup, backward=_dispatch_formula,
)
register(
    "dispatch_backward(Tensor grad, Tensor? grad_weights, Tensor permuted_indices, Tensor splits, SymInt num_rows, "
    "str region) -> (Tensor grad_x, Tensor grad_weights)",
    _dispatch_backward, _dispatch_backward_fake,
)
register(
    "combine(Tensor routed_output, Tensor permuted_indices, Tensor splits, SymInt num_rows, str region) -> Tensor",
    _combine, _combine_fake, setup_context=_combine_setup, backward=_combine_formula,
)
register(
    "combine_backward(Tensor grad, Tensor permuted_indices, Tensor splits, str region) -> Tensor",
    _combine_backward, _combine_backward_fake,
)
