"""Tracing: each operator is one node in each direction, sizes stay symbolic, importing twice is harmless."""
from __future__ import annotations

import importlib
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import ep_fx.ops

ops = torch.ops.ep_fx
E, D, H, K = 4, 8, 12, 2


def _moe(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """A region whose experts also see the routing weights."""
    rows, counts, indices = ops.permute(x, ids, E)
    scores = rows.new_ones(rows.shape[0]) * x.sum()
    routed, routed_scores, local, context, splits = ops.dispatch(rows, counts, scores, 1, "experts")
    hidden = F.silu(ops.grouped_mm(routed, w1, local, b1, False)) * routed_scores.unsqueeze(1)
    y = ops.combine(ops.grouped_mm(hidden, w2, local, None, True), context, splits, rows.shape[0], "experts")
    return ops.unpermute(y, indices, weights)


def _reference(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    out = []
    for token, choices in enumerate(ids.tolist()):
        parts = [x.new_zeros(D)]
        for k, expert in enumerate(choices):
            if expert < E:
                hidden = F.silu(x[token] @ w1[expert] + b1[expert]) * x.sum()
                parts.append(weights[token, k] * (w2[expert] @ hidden))
        out.append(torch.stack(parts).sum(0))
    return torch.stack(out)


def _inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, K), (E, D, H), (E, H), (E, D, H)]
    ids = torch.randint(0, E + 1, (tokens, K), generator=generator)
    weights, w1, b1, w2 = (torch.randn(shape, generator=generator) * 0.3 for shape in shapes)
    return [torch.randn(tokens, D, generator=generator) * 0.3, ids, weights, w1, b1, w2]


def _joint(*arguments: Tensor) -> list[Tensor]:
    *inputs, tangent = arguments
    y = _moe(*inputs)
    return [y, *torch.autograd.grad(y, [leaf for leaf in inputs if leaf.is_floating_point()], tangent)]


@pytest.fixture(scope="module")
def joint() -> fx.GraphModule:
    """Forward and backward of `_moe`, traced once for any number of tokens."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(tensor: Tensor, dynamic: bool) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if dynamic and not dim else DimDynamic.STATIC for dim in range(tensor.dim())]
        made = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        return made.requires_grad_(tensor.is_floating_point())

    inputs = _inputs(5)
    arguments = [fake(tensor, position < 3) for position, tensor in enumerate(inputs)]
    arguments.append(fake(torch.zeros_like(inputs[0]), True))
    with mode, enable_python_dispatcher():
        module = make_fx(_joint)(*arguments)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def test_each_operator_is_one_node_in_each_direction(joint: fx.GraphModule) -> None:
    targets = Counter(str(node.target) for node in joint.graph.nodes if str(node.target).startswith("ep_fx."))
    once = ("permute", "unpermute", "dispatch", "combine")
    expected = {f"ep_fx.{op}{suffix}.default": 1 for op in once for suffix in ("", "_backward")}
    assert targets == {**expected, "ep_fx.grouped_mm.default": 2, "ep_fx.grouped_mm_backward.default": 2}


def test_context_edges_lead_from_dispatch_to_the_other_three(joint: fx.GraphModule) -> None:
    """Nothing stands between: no detach, no copy."""
    dispatch = next(node for node in joint.graph.nodes if node.target is ops.dispatch.default)
    indices, splits = (next(user for user in dispatch.users if user.args[1] == index) for index in (3, 4))
    expected = {ops.combine.default, ops.combine_backward.default, ops.dispatch_backward.default}
    assert {user.target for user in splits.users} == expected
    assert {user.target for user in indices.users if user.target in expected} == expected


def test_number_of_tokens_is_no_literal(joint: fx.GraphModule) -> None:
    literals = [
        (node.name, argument)
        for node in joint.graph.nodes if str(node.target).startswith("ep_fx.")
        for argument in node.args if isinstance(argument, int) and argument in (5, 10)
    ]
    assert literals == []


@pytest.mark.parametrize("tokens", [1, 3, 5, 8])
def test_one_trace_is_right_for_every_number_of_tokens_and_routing(joint: fx.GraphModule, tokens: int) -> None:
    inputs = _inputs(tokens)
    leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in inputs]
    expected = _reference(*leaves)
    tangent = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, [leaf for leaf in leaves if leaf.is_floating_point()], tangent)
    got = joint(*(leaf.detach() for leaf in leaves), tangent)
    for mine, theirs in zip(got, (expected, *grads), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(3, D, requires_grad=True)
    rows, _, _ = ops.permute(x, torch.tensor([[0], [1], [0]]), 2)
    (grad,) = torch.autograd.grad(rows, x, torch.ones_like(rows, requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_importing_the_dialect_again_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ep_fx.ops
    for name in [name for name in sys.modules if name == "ep_fx.ops" or name.startswith("ep_fx.ops.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(ep_fx, "ops", first)
    assert importlib.import_module("ep_fx.ops") is not first
    assert ops.regroup(torch.arange(3), torch.tensor([2, 0, 1])).tolist() == [2, 0, 1]
