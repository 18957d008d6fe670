"""Fused attention in the layout BNSD, without dropout, and its gradients.

`masked` is what the operator calls atten_mask: True where a key is *not* seen. For causal attention it is the packed
triangle, 2048 x 2048 and True above the diagonal, which goes with sparse mode 2: query s sees keys 0..s, as is_causal
of torch has it (mode 3 counts from the other end), for any S and T, and no mask of S x T is made. Values narrower than
keys are filled up with zeros: the operator's text allows them in one place and asks for one shape in another. Queries
that see no key get zeros whatever the operator makes of them.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ep_fx.ops.attention import COPIES
from ep_fx.targets.npu.kernels.registry import call, kernel

PACKED = 2048
_WHOLE, _UP_LEFT = 0, 2
"""sparse_mode: a whole mask without windows, or the packed triangle."""
_WHOLE_ROWS = 2
"""inner_precise: rows that are masked altogether are computed with care."""


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, unseen: Tensor | None, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    statistics = [query.new_empty((*rows, COPIES), dtype=torch.float32) for _ in range(2)]
    return query.new_empty((*rows, value.shape[3])), statistics[0], statistics[1]


@kernel(fake=_attention_fake, results=("output", "softmax_max", "softmax_sum"))
def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, unseen: Tensor | None, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result ``[B,N,S,V]``, and largest score and sum of exponentials of each row ``[B,N,S,8]`` in fp32.

    Args:
        query, key, value: ``[B,N,S,D]``, ``[B,K,T,D]``, ``[B,K,T,V]`` of one dtype, K a divisor of N, V at most D.
        masked: the packed triangle with `is_causal`; else 4-D, broadcast to ``[B,N,S,T]``, or None: all keys are seen.
        unseen: 4-D, the last dimension 1, True for queries that see no key; None with `is_causal`, or without a mask.
        scale: of the scores.
    """
    b, n, s, _ = query.shape
    width = value.shape[3]
    if _is_empty(query, key):
        statistics = query.new_zeros((b, n, s, COPIES), dtype=torch.float32)
        return query.new_zeros((b, n, s, width)), statistics, statistics.clone()
    output, highest, total = call(
        "npu_fusion_attention", query.contiguous(), key.contiguous(), _as_wide(value, key), n, "BNSD",
        atten_mask=_full(masked, is_causal, query, key), scale=scale, **_mode(masked, is_causal),
    )[:3]
    output = output[..., :width]
    return output.masked_fill(unseen, 0) if unseen is not None else output.contiguous(), highest, total


def _attention_grad_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, unseen: Tensor | None,
    output: Tensor, softmax_max: Tensor, softmax_sum: Tensor, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@kernel(fake=_attention_grad_fake, results=("grad_query", "grad_key", "grad_value"))
def npu_fusion_attention_grad(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, unseen: Tensor | None,
    output: Tensor, softmax_max: Tensor, softmax_sum: Tensor, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `query`, `key` and `value` from that of the result and from what forward gave."""
    width = value.shape[3]
    if _is_empty(query, key):
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    grad = grad if unseen is None else grad.masked_fill(unseen, 0)
    dq, dk, dv = call(
        "npu_fusion_attention_grad", query.contiguous(), key.contiguous(), _as_wide(value, key), _as_wide(grad, key),
        query.shape[1], "BNSD", atten_mask=_full(masked, is_causal, query, key), softmax_max=softmax_max,
        softmax_sum=softmax_sum, attention_in=_as_wide(output, key), scale_value=scale, **_mode(masked, is_causal),
    )[:3]
    return dq, dk, dv[..., :width].contiguous()


def _mode(masked: Tensor | None, is_causal: bool) -> dict[str, int]:
    if masked is None:
        return {"sparse_mode": _WHOLE}
    return {"sparse_mode": _UP_LEFT} if is_causal else {"sparse_mode": _WHOLE, "inner_precise": _WHOLE_ROWS}


def _full(masked: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as the operator takes it: one for all, for each sequence, or for each sequence and head, and S x T."""
    if masked is None or is_causal:
        return masked
    batch = masked.shape[0] if guard_or_false(masked.shape[1] == 1) else query.shape[0]
    return masked.expand(batch, masked.shape[1], query.shape[2], key.shape[2]).contiguous()


def _is_empty(query: Tensor, key: Tensor) -> bool:
    return any(guard_or_false(size == 0) for size in (query.shape[0], query.shape[2], key.shape[2]))


def _as_wide(tensor: Tensor, key: Tensor) -> Tensor:
    """`tensor` with zeros behind its last dimension, up to the width of `key`."""
    missing = key.shape[3] - tensor.shape[3]
    return F.pad(tensor, (0, missing)) if missing > 0 else tensor.contiguous()
