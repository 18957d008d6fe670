"""Every fused kernel on the device against our reference of it, in bfloat16 and float32."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ep_fx.testing.npu.reference import REFERENCES
from tests.npu_sim.calls import Call, calls
from tests.oracle import relative_error

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative, of each result; the reference takes the same rounded arguments and sums in float32."""
ALL = [pytest.param(call, dtype, id=f"{call}-{dtype}") for dtype in TOLERANCE for call in calls(dtype)]


def _moved(value: Any) -> Any:
    """On the device; strides stay, as some kernels take transposed views."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu").copy_(value)


@pytest.mark.parametrize(("call", "dtype"), ALL)
def test_kernel_gives_what_its_reference_gives(call: Call, dtype: torch.dtype) -> None:
    args, kwargs = tree_map(_moved, (call.args, call.kwargs))
    got = _compared(getattr(torch.ops.npu, call.name)(*args, **kwargs))
    wanted = _compared(REFERENCES[call.name](*call.args, **call.kwargs))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in wanted]
    for one, other in zip(got, wanted, strict=True):
        if other.is_floating_point():
            assert relative_error(one, other) <= TOLERANCE[dtype]
        else:
            assert torch.equal(one, other)


def _compared(results: Any) -> list[Tensor]:
    """The tensors that hold something."""
    return [x.cpu() for x in tree_leaves(results) if isinstance(x, Tensor) and x.numel()]
