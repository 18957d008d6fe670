"""Rotary embedding of ``[B,N,S,D]`` or ``[B,S,N,D]``, and its gradient.

    halves   y = x * cos + cat(-x[D/2:], x[:D/2]) * sin           cos, sin [.., D]
    pairs    the same of cat(x[0::2], x[1::2])                    cos, sin [.., D/2], for both halves

The operator takes fewer than 1000 sequences and heads, and for the gradient 1024 heads of all sequences. Sizes are
known when it runs; beyond, the same is computed by ATen.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ep_fx.targets.npu.kernels.registry import call, is_empty, kernel

LIMIT, GRADIENT_LIMIT = 1000, 1024


def _rotary_fake(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    return x.new_empty(x.shape)


@kernel(fake=_rotary_fake)
def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """The rotated `x`, contiguous.

    Args:
        x: 4-D, fp16, bf16 or fp32, the last dimension even and below 896.
        cos, sin: 4-D of the dtype of `x`, size 1 where they are the same for all heads or sequences.
        pairs: neighbours turn together, and end up in the two halves.
    """
    if is_empty(x):
        return x.new_empty(x.shape)
    x, cos, sin = _halves(x, pairs), _angles(cos, pairs), _angles(sin, pairs)
    if _is_large(x, cos):
        return torch.addcmul(x * cos, _turned(x), sin)
    y: Tensor = call("npu_rotary_mul", x, cos, sin)
    return y


@kernel(fake=_rotary_fake)
def npu_rotary_mul_backward(grad: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """The gradient of `x`, contiguous, from that of the result.

    The operator also gives the gradients of `cos` and `sin`, for which it is given `x`; nobody asks for them here, and
    `x` is not kept: `grad` stands in its place.
    """
    if is_empty(grad):
        return grad.new_empty(grad.shape)
    grad, cos, sin = grad.contiguous(), _angles(cos, pairs), _angles(sin, pairs)
    if _is_large_backward(grad, cos):
        dx = grad * cos - _turned(grad * sin)
    else:
        dx = call("npu_rotary_mul_backward", grad, grad, cos, sin)[0]
    return torch.stack(dx.chunk(2, -1), -1).flatten(-2) if pairs else dx


def _halves(x: Tensor, pairs: bool) -> Tensor:
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1) if pairs else x.contiguous()


def _angles(angle: Tensor, pairs: bool) -> Tensor:
    return torch.cat((angle, angle), -1) if pairs else angle.contiguous()


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _batch_and_heads(x: Tensor, cos: Tensor) -> tuple[int, int]:
    """Sizes of `x` there; angles are the same for all heads, which tells ``BNSD``, ``BSND`` and ``SBND`` apart."""
    if not guard_or_false(cos.shape[1] == 1):
        return x.shape[0], x.shape[2]
    return (x.shape[1], x.shape[2]) if guard_or_false(cos.shape[2] == 1) else (x.shape[0], x.shape[1])


def _is_large(x: Tensor, cos: Tensor) -> bool:
    return any(guard_or_false(size >= LIMIT) for size in _batch_and_heads(x, cos))


def _is_large_backward(x: Tensor, cos: Tensor) -> bool:
    batch, heads = _batch_and_heads(x, cos)
    return _is_large(x, cos) or guard_or_false(batch * heads > GRADIENT_LIMIT)
