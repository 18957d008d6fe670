"""npu_fusion_attention and its gradient in the layout BNSD, without dropout; computed in fp32.

    scores = scale * q @ k.T, -inf where atten_mask is true       p = softmax(scores)       out = p @ v

`softmax_max` and `softmax_sum` are the maximum and the sum of exp of each row, in fp32, repeated 8 times. A row that is
masked altogether gives zeros, which no source says.
"""
from __future__ import annotations

import torch
from torch import Tensor

ACC = torch.float32
_REPEAT = 8
_WINDOW = 2147483647
"""The default of the window sizes: no window."""
_UP_LEFT = 2
"""sparse_mode of causal attention that counts from the first query and key; its mask is a packed triangle."""

Attended = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _WINDOW,
    next_tockens: int = _WINDOW,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> Attended:
    """[DOC] attention with grouped heads: query head ``n`` uses key head ``n // (N / N_kv)``.

    Args:
        query: ``[B, N, S, D]``; key ``[B, N_kv, S_kv, D]``; value ``[B, N_kv, S_kv, D_v]``.
        head_num: N.
        atten_mask: bool or uint8, true where a key is left out; ``[S, S_kv]`` or 4-D with 1 for B and N where alike.

    Returns:
        out ``[B, N, S, D_v]``, softmax_max and softmax_sum ``[B, N, S, 8]``, an empty tensor, and three numbers.

    Raises:
        NotImplementedError: another layout, dropout, sparse modes but 0 and 2, position encodings, or a sink.
    """
    absent = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink, dropout_mask)
    _refuse(input_layout, keep_prob, sparse_mode, (pre_tockens, next_tockens), absent)
    scores = _scores(query, key, atten_mask, scale, sparse_mode)
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    out = torch.where(total > 0, weights / total, 0) @ _heads(value, query)
    repeated = (largest.expand(*largest.shape[:-1], _REPEAT), total.expand(*total.shape[:-1], _REPEAT))
    return out.to(query.dtype), repeated[0].contiguous(), repeated[1].contiguous(), query.new_empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_in: Tensor | None = None,
    attention_in: Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _WINDOW,
    next_tockens: int = _WINDOW,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """From what forward returned: ``p = exp(scores - max) / sum``, ``dv = p.T @ dy``,
    ``ds = p * (dy @ v.T - sum(dy * out))``, ``dq = scale * ds @ k``, ``dk = scale * ds.T @ q``; those of keys and
    values summed over the query heads that share them.

    Returns:
        dq, dk, dv, None, and an empty tensor [META].
    """
    absent = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink)
    _refuse(input_layout, keep_prob, sparse_mode, (pre_tockens, next_tockens), absent)
    total = softmax_sum[..., :1]
    p = torch.exp(_scores(query, key, atten_mask, scale_value, sparse_mode) - softmax_max[..., :1])
    p = torch.where(total > 0, p / total, 0)
    grad, q, k, v = dy.to(ACC), query.to(ACC), _heads(key, query), _heads(value, query)
    ds = p * (grad @ v.mT - (grad * attention_in.to(ACC)).sum(-1, keepdim=True)) * scale_value
    dk, dv = _shared(ds.mT @ q, key), _shared(p.mT @ grad, value)
    return (ds @ k).to(query.dtype), dk, dv, None, torch.empty(0)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, mode: int) -> Tensor:
    """``[B, N, S, S_kv]``."""
    scores = query.to(ACC) @ _heads(key, query).mT * scale
    if mask is None:
        return scores
    masked = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1) if mode == _UP_LEFT else mask.bool()
    return scores.masked_fill(masked, -torch.inf)


def _heads(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for each query head, in fp32."""
    return shared.to(ACC).repeat_interleave(query.size(1) // shared.size(1), 1)


def _shared(grad: Tensor, like: Tensor) -> Tensor:
    """Sum over the query heads that share a key head."""
    batch, heads, *rest = like.shape
    return grad.view(batch, heads, grad.size(1) // heads, *rest).sum(2).to(like.dtype)


def _refuse(layout: str, keep_prob: float, mode: int, window: tuple[int, int], absent: tuple[object, ...]) -> None:
    if layout != "BNSD" or keep_prob != 1 or mode not in (0, _UP_LEFT) or window != (_WINDOW, _WINDOW) or any(
        value is not None for value in absent
    ):
        raise NotImplementedError(
            f"layout BNSD with a whole mask or a packed triangle, no dropout and no options is computed; got "
            f"{layout!r}, keep_prob {keep_prob}, sparse_mode {mode}, window {window}"
        )
