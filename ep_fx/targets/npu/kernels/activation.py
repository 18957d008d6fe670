"""SwiGLU of the two halves of one tensor: ``silu(x[.., :H]) * x[.., H:]``."""
from __future__ import annotations

from torch import Tensor

from ep_fx.targets.npu.kernels.registry import call, is_empty, kernel


def _swiglu_fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@kernel(fake=_swiglu_fake)
def npu_swiglu(x: Tensor) -> Tensor:
    """``[.., 2H]`` to ``[.., H]``; fp16, bf16 or fp32."""
    if is_empty(x):
        return _swiglu_fake(x)
    result: Tensor = call("npu_swiglu", x.contiguous(), -1)
    return result


def _swiglu_backward_fake(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@kernel(fake=_swiglu_backward_fake)
def npu_swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient ``[.., 2H]`` of the argument of `npu_swiglu`."""
    if is_empty(x):
        return _swiglu_backward_fake(grad, x)
    result: Tensor = call("npu_swiglu_backward", grad.contiguous(), x.contiguous(), -1)
    return result
