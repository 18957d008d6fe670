"""Our references return what the wheel's Meta kernels say: how many results, their shapes and dtypes."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ep_fx.testing.npu.reference import REFERENCES
from tests.npu_sim.calls import Call, calls

ALL = [pytest.param(call, id=f"{call}-{dtype}") for dtype in (torch.float32, torch.bfloat16) for call in calls(dtype)]


def _described(results: Any) -> list[Any]:
    values = results if isinstance(results, (tuple, list)) else [results]
    return [(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value) for value in values]


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def test_every_reference_is_called() -> None:
    assert {parameter.values[0].name for parameter in ALL} == set(REFERENCES)


@pytest.mark.parametrize("call", ALL)
def test_results(call: Call) -> None:
    args, kwargs = tree_map(_meta, (call.args, call.kwargs))
    wanted = _described(getattr(torch.ops.npu, call.name)(*args, **kwargs))
    assert _described(REFERENCES[call.name](*call.args, **call.kwargs)) == wanted
