"""Emitted functions: boxed arguments, constants, no autograd of their own."""
from __future__ import annotations

import pytest
import torch
from torch import fx

from ep_fx.graph import NodeInfo, Phase, set_info
from ep_fx.targets import emit


def _graph() -> fx.Graph:
    """x -> x * 2 + constant"""
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (doubled, graph.get_attr("constant"))))
    return graph


def test_an_emitted_function_empties_its_arguments() -> None:
    arguments = [torch.ones(2)]
    assert emit(_graph(), {"constant": torch.ones(2)})(arguments).tolist() == [3, 3]
    assert arguments == []


def test_an_emitted_function_records_no_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    assert emit(_graph(), {"constant": torch.ones(2)})([x]).grad_fn is None
    assert (x * 2).grad_fn is not None


def test_an_error_names_the_node_its_module_and_its_source() -> None:
    graph = _graph()
    add = next(node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor)
    set_info(add, NodeInfo(Phase.BACKWARD, "blocks.0.mlp", "model.py:7"))
    with pytest.raises(RuntimeError) as error:
        emit(graph, {"constant": torch.ones(3)})([torch.ones(2)])
    assert error.value.__notes__ == [
        "raised by %add_tensor = aten::add, backward, module 'blocks.0.mlp' (model.py:7)"
    ]


def _flattened(write: bool) -> fx.Graph:
    """x [2, 3] -> view(x, [6]), and in place x + 1 where asked."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    flat = graph.call_function(torch.ops.aten.view.default, (x, [6]))
    if write:
        graph.call_function(torch.ops.aten.add_.Scalar, (x, 1))
    graph.output(flat)
    return graph


def test_a_view_of_strides_other_than_those_traced_copies() -> None:
    transposed = torch.arange(6).view(3, 2).t()
    assert emit(_flattened(write=False), {})([transposed]).tolist() == transposed.flatten().tolist()


def test_a_view_of_memory_that_is_written_stays_a_view() -> None:
    assert emit(_flattened(write=True), {})([torch.zeros(2, 3)]).tolist() == [1] * 6
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        emit(_flattened(write=True), {})([torch.zeros(3, 2).t()])
