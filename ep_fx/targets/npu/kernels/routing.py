"""Rows into expert order and back: the four kernels of torch_npu that permute tokens, and what goes with them.

    rows[sorted_indices[t * K + k]] = tokens[t]             y[t] = sum over k of probs[t, k] * row of (t, k)

`sorted_indices` (int32) is the inverse of the dialect's permuted_indices. Rows may be 1-D: weights that travel with
their rows. Rows of zero tokens never meet a kernel. Results are contiguous. Unlike the dialect's, the counts are not
checked for ids outside of ``0..num_experts``: the assertion would run on the CPU.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ep_fx.targets.npu.kernels.registry import call, composition, is_empty, kernel


def _as_rows(rows: Tensor) -> Tensor:
    return (rows.unsqueeze(1) if rows.dim() == 1 else rows).contiguous()


def _permute_fake(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    count = indices.numel()
    return tokens.new_empty((count, *tokens.shape[1:])), indices.new_empty((count,), dtype=torch.int32)


@kernel(fake=_permute_fake, results=("rows", "sorted_indices"))
def npu_moe_token_permute(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in the order of their experts, those of one expert in the order of their tokens.

    Args:
        tokens: ``[T, D]`` or ``[T]``, fp16, bf16 or fp32.
        indices: ``[T, K]`` or ``[T]``, any integers that are not negative.

    Returns:
        rows ``[T*K, D]`` (``[T*K]``) and sorted_indices ``[T*K]``, int32.
    """
    if is_empty(indices):
        return _permute_fake(tokens, indices)
    ids = indices.to(torch.int32).contiguous()
    rows, sorted_indices = call("npu_moe_token_permute", _as_rows(tokens), ids)
    return rows.view(-1, *tokens.shape[1:]), sorted_indices


def _permute_grad_fake(grad: Tensor, sorted_indices: Tensor, num_tokens: int | None, top_k: int) -> Tensor:
    return grad.new_empty((grad.shape[0] if num_tokens is None else num_tokens, *grad.shape[1:]))


@kernel(fake=_permute_grad_fake)
def npu_moe_token_permute_grad_v2(grad: Tensor, sorted_indices: Tensor, num_tokens: int | None, top_k: int) -> Tensor:
    """Gradient of the tokens: the sums, kept in fp32, of the gradients ``[T*K, D]`` of their rows.

    Args:
        num_tokens: T; None: one for each row.

    Returns:
        ``[T, D]`` in the dtype of `grad`.
    """
    tokens = grad.shape[0] if num_tokens is None else num_tokens
    if is_empty(sorted_indices):
        return grad.new_zeros((tokens, *grad.shape[1:]))
    total: Tensor = call("npu_moe_token_permute_grad_v2", _as_rows(grad), sorted_indices, tokens, grad.dtype, top_k)
    return total.view(tokens, *grad.shape[1:])


def _unpermute_fake(rows: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    return rows.new_empty(((rows if probs is None else probs).shape[0], *rows.shape[1:]))


@kernel(fake=_unpermute_fake)
def npu_moe_token_unpermute(rows: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    """Rows back in the order of their tokens: weighted by `probs` and added up, or as they are, one for each token.

    Args:
        rows: ``[T*K, D]`` or ``[T*K]``.
        probs: ``[T, K]``, fp16, bf16 or fp32; None: K is 1.

    Returns:
        ``[T, D]`` (``[T]``) in the dtype of `rows`.
    """
    if is_empty(sorted_indices):
        return rows.new_zeros(((rows if probs is None else probs).shape[0], *rows.shape[1:]))
    weights = None if probs is None else probs.contiguous()
    tokens: Tensor = call("npu_moe_token_unpermute", _as_rows(rows), sorted_indices, weights)
    return tokens.view(-1, *rows.shape[1:])


def _unpermute_grad_fake(
    grad: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, rows: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    grad_probs = None if probs is None else probs.new_empty(probs.shape)
    return grad.new_empty((sorted_indices.shape[0], *grad.shape[1:])), grad_probs


@kernel(fake=_unpermute_grad_fake, results=("grad_rows", "grad_probs"))
def npu_moe_token_unpermute_grad_v2(
    grad: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, rows: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows ``[T*K, D]``, and of `probs` where there are any.

    Args:
        grad: ``[T, D]`` or ``[T]``.
        probs, rows: what `npu_moe_token_unpermute` was given; no `rows` without `probs`.
    """
    if is_empty(sorted_indices):
        return grad.new_zeros((sorted_indices.shape[0], *grad.shape[1:])), None if probs is None else probs.clone()
    weights = None if probs is None else probs.contiguous()
    values = None if rows is None else rows.contiguous()
    grad_rows, grad_probs = call(
        "npu_moe_token_unpermute_grad_v2", _as_rows(grad), sorted_indices, sorted_indices.shape[0], grad.dtype, weights,
        False, None, values,
    )  # fmt: skip
    return grad_rows.view(-1, *grad.shape[1:]), None if probs is None else grad_probs


@composition
def tokens_per_expert(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Rows of each expert ``[E]``, int64; an id equal to `num_experts` is not counted.

    Added up in int32, which the device's kernel takes.
    """
    ids = topk_ids.reshape(-1).to(torch.int64)
    ones = torch.ones_like(ids, dtype=torch.int32)
    counts = ones.new_zeros((num_experts + 1,)).scatter_add(0, ids, ones)
    return counts[:num_experts].to(torch.int64)
