"""RMS norm over the last dimension, and its gradients."""
from __future__ import annotations

import torch
from torch import Tensor

from ep_fx.targets.npu.kernels.registry import call, is_empty, kernel


def _norm_fake(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@kernel(fake=_norm_fake, results=("result", "rstd"))
def npu_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x * x) + epsilon) * weight``, and the reciprocal root ``[..., 1]`` in fp32.

    Args:
        x: ``[..., H]``, fp16, bf16 or fp32, of 2 to 8 dimensions.
        weight: ``[H]`` of the dtype of `x`.
    """
    if is_empty(x):
        return _norm_fake(x, weight, epsilon)
    y, rstd = call("npu_rms_norm", x.contiguous(), weight.contiguous(), epsilon)
    return y, rstd


def _norm_backward_fake(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)


@kernel(fake=_norm_backward_fake, results=("grad_x", "grad_weight"))
def npu_rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `x` in its dtype, and that of `weight` in fp32.

    Args:
        grad: gradient of the result.
        rstd: the reciprocal root that `npu_rms_norm` gave.
    """
    if is_empty(x):
        return x.new_empty(x.shape), weight.new_zeros(weight.shape, dtype=torch.float32)
    dx, dw = call("npu_rms_norm_backward", grad.contiguous(), x.contiguous(), weight.contiguous(), rstd)
    return dx, dw
