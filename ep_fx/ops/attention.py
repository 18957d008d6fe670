"""attention: softmax(query @ key.T * scale, masked) @ value as one operator, for targets that have one kernel for it.

    output, softmax_max, softmax_sum = attention(query [B,N,S,D], key [B,K,T,D], value [B,K,T,V], mask, causal, scale)

K divides N, V may differ from D. `mask` is boolean, True where a key is seen, or of floats, which are added; it
broadcasts to [B,N,S,T]. A causal query at s sees keys 0..s. A query that sees no key gives zeros, as in torch. Of each
row the largest score and the sum of its exponentials are kept, eight times over [B,N,S,8], as kernels want them.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_fx.ops.library import accumulation_dtype, register

COPIES = 8
"""How often the statistics of a row are repeated."""


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Scores ``[B, N, S, T]``, at least fp32, -inf where a key is not seen."""
    b, n, s, _ = query.shape
    scores = (_grouped(query, key) @ _wide(key).mT).mul_(scale).view(b, n, s, key.shape[2])
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
        scores.masked_fill_(~seen, -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores.add_(mask)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(accumulation_dtype(tensor))


def _grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """``[B, N, S, D]`` as ``[B, K, N/K * S, D]``: the rows of all heads that share a key, at least fp32."""
    b, k = key.shape[:2]
    return _wide(tensor).reshape(b, k, tensor.shape[1] // k * tensor.shape[2], tensor.shape[3])


def _is_empty(query: Tensor, key: Tensor) -> bool:
    return 0 in (*query.shape[:3], key.shape[2])


def _repeated(row: Tensor) -> Tensor:
    return row.expand(*row.shape[:-1], COPIES).contiguous()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    b, n, s, _ = query.shape
    if _is_empty(query, key):
        statistic = query.new_zeros((b, n, s, COPIES), dtype=accumulation_dtype(query))
        return query.new_zeros((b, n, s, value.shape[3])), statistic, statistic.clone()
    scores = _scores(query, key, mask, is_causal, scale)
    highest = scores.amax(-1, keepdim=True)
    highest.masked_fill_(highest == -torch.inf, 0)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    output = (_grouped(weights, key) @ _wide(value)).view(b, n, s, value.shape[3])
    output /= total.masked_fill(total == 0, 1)
    return output.to(query.dtype), _repeated(highest), _repeated(total)


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    output = query.new_empty([*rows, value.shape[3]])
    statistics = [query.new_empty([*rows, COPIES], dtype=accumulation_dtype(query)) for _ in range(2)]
    return output, statistics[0], statistics[1]


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _attention_formula(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
    if grad is None:
        return (None,) * 6
    gradients = torch.ops.ep_fx.attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return *gradients, None, None, None


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, softmax_max: Tensor,
    softmax_sum: Tensor, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if _is_empty(query, key):
        return query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    total = softmax_sum[..., :1]
    weights = _scores(query, key, mask, is_causal, scale).sub_(softmax_max[..., :1]).exp_()
    weights /= total.masked_fill(total == 0, 1)
    rows, weights = _grouped(grad, key), _grouped(weights, key)
    grad_value = weights.mT @ rows
    mean = (rows * _grouped(output, key)).sum(-1, keepdim=True)
    of_scores = weights.mul_((rows @ _wide(value).mT).sub_(mean)).mul_(scale)
    grad_query = (of_scores @ _wide(key)).view(query.shape)
    grad_key = of_scores.mT @ _grouped(query, key)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _attention_backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, softmax_max: Tensor,
    softmax_sum: Tensor, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


register(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> "
    "(Tensor output, Tensor softmax_max, Tensor softmax_sum)",
    _attention, _attention_fake, setup_context=_attention_setup, backward=_attention_formula,
)
register(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor output, "
    "Tensor softmax_max, Tensor softmax_sum, bool is_causal, float scale) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    _attention_backward, _attention_backward_fake,
)
