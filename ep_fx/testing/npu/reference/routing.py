"""Token rows into expert order and back: npu_moe_token_permute, _unpermute, and their gradients.

`sorted_indices` is the inverse permutation: where the row of (token t, choice k), the number ``t * top_k + k``, went.
It is int32 and has every choice, also of rows that `num_out_tokens` cut off; those count as rows of zeros, in forward
and backward, which no source says.
"""
from __future__ import annotations

import torch
from torch import Tensor

ACC = torch.float32


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """[ACL] aclnnMoeTokenPermute: ``first = argsort(indices.flatten(), stable)``, ``sorted_indices = argsort(first)``,
    ``permuted[sorted_indices[i]] = tokens[i // top_k]``. [META]: `num_out_tokens` None or 0 is all rows, a negative
    number leaves out that many.

    Args:
        tokens: ``[T, H]``.
        indices: ``[T, K]`` or ``[T]``, expert of each choice.

    Returns:
        permuted ``[n, H]`` and sorted_indices ``[T * K]`` int32.
    """
    _refuse_padding(padded_mode)
    top_k = 1 if indices.dim() == 1 else indices.size(1)
    first = torch.argsort(indices.reshape(-1), stable=True)
    wanted = num_out_tokens or 0
    count = min(wanted, first.numel()) if wanted > 0 else first.numel() + wanted
    rows = tokens.index_select(0, first[:count] // max(top_k, 1))
    return rows, torch.argsort(first, stable=True).to(torch.int32)


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    """[ACL] aclnnMoeTokenPermuteGrad: ``grad.index_select(0, sorted_indices).reshape(T, K, H).sum(1)``.

    Returns:
        ``[T, H]`` in `tokens_dtype`.
    """
    _refuse_padding(padded_mode)
    rows = _rows_or_zero(grad_permuted_tokens, sorted_indices).to(ACC)
    return rows.view(tokens_size_0, num_topK, grad_permuted_tokens.size(1)).sum(1).to(tokens_dtype)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """[ACL] aclnnMoeTokenUnpermute: ``out[t] = sum over k of permuted[sorted_indices[t * K + k]] * probs[t, k]``.
    Without `probs` K is 1: every row comes back, nothing is summed.

    Args:
        permuted_tokens: ``[n, H]``.
        sorted_indices: ``[T * K]``.
        probs: ``[T, K]``.

    Returns:
        ``[T, H]`` in the dtype of `permuted_tokens`.
    """
    _refuse_padding(padded_mode)
    rows = _by_choice(permuted_tokens, sorted_indices, probs)
    if probs is not None:
        rows = rows * probs.to(ACC).unsqueeze(-1)
    return rows.sum(1).to(permuted_tokens.dtype)


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """[ACL] aclnnMoeTokenUnpermuteGrad: ``d permuted[sorted_indices[i]] = grad[i // K] * probs[i // K, i % K]`` and
    ``d probs[t, k] = (grad[t] * permuted[sorted_indices[t * K + k]]).sum()``.

    Returns:
        ``[n, H]`` in `permuted_tokens_dtype`, and ``[T, K]``, None without `probs`.
    """
    _refuse_padding(padded_mode)
    grad, grad_probs = grad_unpermuted_tokens.to(ACC).unsqueeze(1), None
    if probs is not None:
        assert permuted_tokens is not None
        grad_probs = (grad * _by_choice(permuted_tokens, sorted_indices, probs)).sum(-1).to(probs.dtype)
        grad = grad * probs.to(ACC).unsqueeze(-1)
    position = sorted_indices.long()
    kept = position < permuted_tokens_size_0
    result = grad.new_zeros(permuted_tokens_size_0, grad.size(-1))
    result[position[kept]] = grad.reshape(-1, grad.size(-1))[kept]
    return result.to(permuted_tokens_dtype), grad_probs


def _by_choice(permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None) -> Tensor:
    """``[T, K, H]`` in fp32."""
    top_k = 1 if probs is None else probs.size(1)
    tokens = sorted_indices.numel() // max(top_k, 1)
    return _rows_or_zero(permuted, sorted_indices).view(tokens, top_k, permuted.size(-1)).to(ACC)


def _rows_or_zero(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, zeros where `index` points behind the last row."""
    kept = index < rows.size(0)
    result = rows.new_zeros(index.numel(), rows.size(1))
    result[kept] = rows[index[kept].long()]
    return result


def _refuse_padding(padded_mode: bool) -> None:
    if padded_mode:
        raise NotImplementedError("padded_mode=True is supported by no kernel [ACL]")
