"""npu_swiglu, npu_rms_norm, npu_rotary_mul, and their gradients; computed in fp32."""
from __future__ import annotations

import torch
from torch import Tensor

ACC = torch.float32


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """[DOC] ``silu(a) * b`` with a and b the halves of `input` along `dim`."""
    gate, up = input.to(ACC).chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """The gradient of `input`; with ``s = sigmoid(a)``: ``grad * b * (s + a * s * (1 - s))`` and ``grad * a * s``."""
    gate, up = input.to(ACC).chunk(2, dim)
    grad, s = grad_output.to(ACC), torch.sigmoid(gate)
    return torch.cat([grad * up * (s + gate * s * (1 - s)), grad * gate * s], dim).to(input.dtype)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """[DOC], [META]: ``input * rstd * gamma`` with ``rstd = 1 / sqrt(mean(input ** 2) + epsilon)``, the mean over the
    dimensions of `gamma`.

    Returns:
        the dtype and shape of `input`, and rstd in fp32, these dimensions being 1.
    """
    x = input.to(ACC)
    rstd = torch.rsqrt(x.square().mean(_normed(input, gamma), keepdim=True) + epsilon)
    return (x * rstd * gamma.to(ACC)).to(input.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """With ``n = input * rstd``: ``dx = rstd * (dy * gamma - n * mean(dy * gamma * n))`` and ``d gamma = sum(dy * n)``.

    Returns:
        dx in the dtype of `input`, d gamma in fp32 [META].
    """
    x, grad = input.to(ACC), dy.to(ACC)
    normed, scaled = x * rstd, grad * gamma.to(ACC)
    dx = rstd * (scaled - normed * (scaled * normed).mean(_normed(input, gamma), keepdim=True))
    return dx.to(input.dtype), (grad * normed).sum_to_size(gamma.shape)


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """[DOC] ``input * r1 + turned * r2``; turned is ``cat(-x2, x1)`` of the halves ("half"), or of the odd and even
    places ("interleave")."""
    if rotate is not None:
        raise NotImplementedError("rotate is not computed")
    x = input.to(ACC)
    return (x * r1.to(ACC) + _turned(x, rotary_mode) * r2.to(ACC)).to(input.dtype)


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `input`, `r1` and `r2`, those of the last two summed to their shapes."""
    g, x, cos, sin = (tensor.to(ACC) for tensor in (grad, input, r1, r2))
    dx = g * cos - _turned(g * sin, rotary_mode)  # turning twice negates: its transpose is its negative
    d_r1, d_r2 = (g * x).sum_to_size(r1.shape), (g * _turned(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(input.dtype), d_r1.to(r1.dtype), d_r2.to(r2.dtype)


def _normed(input: Tensor, gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(input.dim() - gamma.dim(), input.dim()))


def _turned(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    if mode == "interleave":
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    raise ValueError(f"rotary_mode {mode!r}: 'half' or 'interleave'")
