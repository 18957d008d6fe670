"""Writes in place go where nobody can tell, and stay where somebody could."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ep_fx.graph import ParallelGraph, is_mutation
from ep_fx.targets.npu.lowering import kept_reason
from ep_fx.targets.npu.lowerings import IN_PLACE
from tests.npu.joint import errors, graph_of, on_cpu, record, traced

aten = torch.ops.aten


def _lowered(run: Callable[..., object], *inputs: Tensor) -> ParallelGraph:
    """The graph of `run` after this line of the table, checked to compute the same."""
    graph = traced(run, *inputs)
    lowered = graph.copy()
    IN_PLACE.apply(lowered)
    found, wanted = on_cpu(lowered, *(x.clone() for x in inputs)), on_cpu(graph, *(x.clone() for x in inputs))
    assert max(errors(found, wanted)) == 0
    return lowered


def _written(graph: ParallelGraph) -> list[str]:
    return [str(node.target) for node in graph if is_mutation(node)]


X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])


def test_later_readers_of_the_argument_read_the_result() -> None:
    def run(x: Tensor) -> object:
        y = x * 2
        before = y.sum()
        z = y.div_(4).add_(1)
        return before, y + 1, z

    assert _written(_lowered(run, X)) == []


def test_a_write_keeps_the_dtype_of_what_it_writes() -> None:
    def run(x: Tensor) -> object:
        return (x.bfloat16() * 2).mul_(x)

    graph = _lowered(run, X)
    assert _written(graph) == []
    assert graph.output.args[0].meta["val"].dtype is torch.bfloat16  # type: ignore[union-attr]


def test_a_view_that_is_read_later_keeps_the_write() -> None:
    def run(x: Tensor) -> object:
        y = x * 2
        row = y[0]
        y.add_(1)
        return row * 3

    graph = _lowered(run, X)
    assert _written(graph) == ["aten.add_.Tensor"]
    (reason,) = [kept_reason(node) for node in graph if is_mutation(node)]
    assert reason is not None
    assert "reads the same memory later" in reason


def test_a_write_to_a_view_keeps_while_the_whole_is_read_later() -> None:
    def run(x: Tensor) -> object:
        y = x * 2
        y[0].add_(1)
        return y * 3

    assert _written(_lowered(run, X)) == ["aten.add_.Tensor"]


def test_a_view_of_the_result_may_be_read_later() -> None:
    def run(x: Tensor) -> object:
        y = (x * 2).add_(1)
        return y[0] * 3

    assert _written(_lowered(run, X)) == []


def test_inputs_are_still_written() -> None:
    def run(x: Tensor) -> object:
        x.add_(1)
        return x * 2

    graph = _lowered(run, X)
    assert _written(graph) == ["aten.add_.Tensor"]
    assert [kept_reason(node) for node in graph if is_mutation(node)] == [None]


def test_readers_of_the_argument_itself_are_moved_over() -> None:
    """As a graph may have it: a trace shows such readers the result."""
    graph = graph_of(fx.Graph())
    x = graph.graph.placeholder("x")
    doubled = graph.call(aten.mul.Tensor, x, 2)
    before = graph.call(aten.sum.default, doubled)
    graph.call(aten.add_.Tensor, doubled, 1)
    after = graph.call(aten.mul.Tensor, doubled, 3)
    graph.graph.output((before, after, doubled))
    record(graph, X)
    lowered = graph.copy()
    IN_PLACE.apply(lowered)
    assert _written(lowered) == []
    assert max(errors(on_cpu(lowered, X.clone()), on_cpu(graph, X.clone()))) == 0
