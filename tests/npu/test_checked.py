"""What a kernel would give its operator is held against the conditions, without the operator."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false

from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import call, reached


def regroup(tokens: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel: ids of any integer type, none for empty input."""
    if guard_or_false(tokens.shape[0] == 0):
        return tokens.clone(), ids.to(torch.int32)
    result: tuple[Tensor, Tensor] = call("npu_moe_token_permute", tokens, ids.to(torch.int32))
    return result


def test_the_call_is_seen_and_not_made() -> None:
    found = reached(regroup, torch.ones(3, 4), torch.tensor([0, 1, 0]))
    assert found is not None
    assert found.op == "npu_moe_token_permute"
    assert found.args[1].dtype is torch.int32
    assert reached(regroup, torch.ones(0, 4), torch.ones(0)) is None
    with pytest.raises(AttributeError, match="npu_moe_token_permute"):
        regroup(torch.ones(3, 4), torch.tensor([0, 1, 0]))


def test_conditions_are_those_of_the_operator() -> None:
    with FakeTensorMode(shape_env=(env := ShapeEnv())):
        rows = env.create_unbacked_symint()
        tokens, ids = torch.empty(rows, 4), torch.empty(rows, dtype=torch.int64)
        found = checked(regroup, (tokens, ids))
        assert found.broken == ()  # the kernel converts the ids
        assert [f.condition.limit for f in found.at_run_time] == [16777215]
        assert checked(regroup, (torch.empty(0, 4), ids)).at_run_time == ()
        assert "got torch.float64" in str(checked(regroup, (tokens.double(), ids)).reason)
    assert not env.guards


def test_nodes_stand_for_their_values() -> None:
    graph = fx.Graph()
    tokens, ids = graph.placeholder("tokens"), graph.placeholder("ids")
    with FakeTensorMode():
        tokens.meta["val"], ids.meta["val"] = torch.empty(3, 2, 4), torch.empty(3, dtype=torch.int64)
    assert "tokens: 2-D, got 3-D, float32[3, 2, 4]" in str(checked(regroup, (tokens, ids)).reason)
    del tokens.meta["val"]
    with pytest.raises(ValueError, match="%tokens has no recorded value"):
        checked(regroup, (tokens, ids))
