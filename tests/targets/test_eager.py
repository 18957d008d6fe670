"""Emitted functions: boxed arguments, constants, no autograd of their own."""
from __future__ import annotations

import torch
from torch import fx

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
