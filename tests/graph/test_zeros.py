"""Constant zeros are recognised through views and copies, and nothing else is taken for them."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from ep_fx.graph.zeros import is_zero

aten = torch.ops.aten


def node(target: Any, *args: Any) -> fx.Node:
    graph = fx.Graph()
    graph.placeholder("x")
    return graph.call_function(target, tuple(next(iter(graph.nodes)) if a == "x" else a for a in args))


@pytest.mark.parametrize(
    "zero",
    [
        node(aten.zeros.default, [2]), node(aten.zeros_like.default, "x"), node(aten.new_zeros.default, "x", [2]),
        node(aten.full.default, [2], 0), node(aten.full_like.default, "x", 0.0),
        node(aten.new_full.default, "x", [2], 0), node(aten.scalar_tensor.default, 0),
    ],
    ids=lambda n: n.name,
)
def test_zero_and_its_views(zero: fx.Node) -> None:
    assert is_zero(zero)
    wide = zero.graph.call_function(aten.expand.default, (zero, [3, 2]))
    assert is_zero(zero.graph.call_function(aten._to_copy.default, (wide,)))


@pytest.mark.parametrize(
    "other",
    [
        node(aten.ones.default, [2]), node(aten.full.default, [2], 1), node(aten.empty.memory_format, [2]),
        node(aten.mul.Tensor, "x", 0), node(aten.new_full.default, "x", [0], 1), node(aten.view.default, "x", [2]),
    ],
    ids=lambda n: n.name,
)
def test_everything_else(other: fx.Node) -> None:
    assert not is_zero(other)
