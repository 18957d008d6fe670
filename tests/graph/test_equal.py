"""Two graphs are equal where they are the same program with the same facts: names and labels do not count."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from ep_fx.graph import (
    NodeInfo,
    Phase,
    graph_difference,
    graph_equal,
    info_of,
    parse_graph,
    print_graph,
    set_info,
)
from tests.verify.builder import Step

aten = torch.ops.aten


def edit(name: str, change: Callable[[fx.Node], None]) -> Callable[[Step], None]:
    return lambda step: change(step[name])


def set_args(*args: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.args = args

    return change


EDITS: dict[str, tuple[Callable[[Step], None], str]] = {
    "argument": (edit("scores", lambda n: set_args(n.args[0], -2, False)(n)), "arguments"),
    "kind of argument": (edit("scores", lambda n: set_args(n.args[0], -1, 0)(n)), "arguments"),
    "kind of list": (edit("reshard_first_forward", lambda n: set_args(tuple(n.args[0]))(n)), "arguments"),
    "keyword": (edit("grad_h", lambda n: setattr(n, "kwargs", {"alpha": 2.0})), "arguments"),
    "edge": (edit("act", lambda n: set_args(n.args[0].args[0])(n)), "arguments"),
    "target": (edit("act", lambda n: setattr(n, "target", aten.neg.default)), "aten.relu.default and aten.neg.default"),
    "phase": (edit("act", lambda n: set_info(n, NodeInfo(Phase.BACKWARD))), "forward and backward"),
    "value": (edit("act", lambda n: n.meta.update(val=torch.zeros(2, 3, device="meta"))), r"no type and f32\[2, 3\]"),
    "order": (lambda step: step["first_t"].append(step["count_step"]), "arguments|call_function|aten"),
    "one less": (lambda step: step.fx.erase_node(step["reshard_last_backward"]), "arguments|aten|nodes"),
    "group": (edit("dispatch", lambda n: set_args(*n.args[:3], "fsdp")(n)), "arguments .*tokens.*fsdp"),
    "output": (lambda step: step.graph.set_gradients({"last.weight": step["scores"]}), "arguments"),
}


@pytest.mark.parametrize("name", EDITS)
def test_graphs_differ_where_they_compute_otherwise(name: str) -> None:
    change, message = EDITS[name]
    step = Step()
    change(step)
    difference = graph_difference(Step().graph, step.graph)
    assert difference is not None
    assert re.search(message, difference), difference
    assert graph_difference(step.graph, parse_graph(print_graph(step.graph))) is None or name == "order"


def test_names_and_labels_are_no_difference() -> None:
    step = Step()
    for index, node in enumerate(step.fx.nodes):
        if node.op == "call_function":
            node._rename(f"other_{index}")
            set_info(node, NodeInfo(info_of(node).phase, "elsewhere", "other.py:1"))
    assert graph_equal(Step().graph, step.graph)
