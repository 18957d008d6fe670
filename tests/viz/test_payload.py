"""The data of the page: what each node is, where it belongs, when it is alive, what the passes did."""
from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from ep_fx.cost import live_unsharded_bytes
from ep_fx.cost.timeline import timeline
from ep_fx.graph import ParallelGraph, PassManager, role_of
from ep_fx.graph.printer import GraphText
from ep_fx.passes import default_pipeline
from ep_fx.testing.synthetic import logical_step
from ep_fx.viz import to_html
from ep_fx.viz.model import EdgeKind, Kind
from ep_fx.viz.payload import EDGES, KINDS, STORED, payload
from tests.viz import sample


class Nodes:
    """Columns by name of the node."""

    def __init__(self, graph: ParallelGraph) -> None:
        self.data = payload(graph, GraphText(graph), (), None)
        self.index = {name: i for i, name in enumerate(self.data["nodes"]["name"])}

    def text(self, column: str, name: str) -> str:
        found: str = self.data["strings"][self.data["nodes"][column][self.index[name]]]
        return found

    def kind(self, name: str) -> Kind:
        return KINDS[self.data["nodes"]["kind"][self.index[name]]]

    def edges(self, kind: EdgeKind) -> set[tuple[str, str]]:
        names = self.data["nodes"]["name"]
        return {(names[a], names[b]) for a, b, k in zip(*self.data["edges"], strict=True) if EDGES[k] is kind}


@pytest.fixture(scope="module")
def nodes(graph: ParallelGraph) -> Nodes:
    return Nodes(graph)


def test_a_node_knows_its_module_kind_source_group_and_parameters(nodes: Nodes) -> None:
    assert nodes.text("path", "unshard_1") == "layers.0"
    assert nodes.text("group", "unshard_1") == "fsdp,ep"
    assert nodes.text("params", "unshard_1") == "layers.0.fc.weight, layers.0.fc.bias"
    assert nodes.text("source", "mm") == "model.py:12"
    assert nodes.kind("unshard_1") is Kind.UNSHARD
    assert nodes.kind("unshard_wait_1") is Kind.WAIT
    assert nodes.kind("mm") is Kind.COMPUTE


def test_parameters_stand_apart_and_inputs_do_not(nodes: Nodes) -> None:
    assert nodes.text("path", "p0") == STORED
    assert nodes.text("path", "tokens") == ""


def test_a_collective_knows_its_wait(nodes: Nodes) -> None:
    wait = nodes.data["nodes"]["wait"][nodes.index["unshard_1"]]
    assert nodes.data["nodes"]["name"][wait] == "unshard_wait_1"
    assert nodes.data["nodes"]["wait"][nodes.index["mm"]] == -1


def test_the_context_leads_to_dispatch_and_combine_in_both_halves(nodes: Nodes) -> None:
    readers = {b for a, b in nodes.edges(EdgeKind.CONTEXT) if a.startswith("context.")}
    assert {"send_rows", "regroup", "ungroup", "pad_rows"} <= readers
    assert {"send_rows_1", "regroup_1", "ungroup_1", "pad_rows_1"} <= readers


def test_lives_span_unshard_to_reshard(graph: ParallelGraph, nodes: Nodes) -> None:
    names = nodes.data["nodes"]["name"]
    order = list(graph)
    lives = nodes.data["lives"]
    assert len(lives) == 8                                              # four units, twice
    for unit, start, end, size in lives:
        assert names[start].startswith("unshard")
        assert role_of(order[end]).value == "ep_fx::reshard"
        assert nodes.text("path", names[start]) == nodes.data["strings"][unit].replace("root", "")
        assert size > 0


def test_the_memory_curve_is_that_of_the_cost_model(graph: ParallelGraph, nodes: Nodes) -> None:
    points = dict(map(tuple, nodes.data["memory"]))
    alive = 0
    for position, (_, wanted) in enumerate(live_unsharded_bytes(graph)):
        alive = points.get(position, alive)
        assert alive == wanted


# -- times -------------------------------------------------------------------------------------------------------------
def test_times_are_those_of_the_cost_model_in_nanoseconds(graph: ParallelGraph, nodes: Nodes) -> None:
    line, clock = timeline(graph), list(accumulate(nodes.data["times"]["clock"]))
    assert clock == [round(line.passed[node] * 1e9) for node in graph]
    slices = nodes.data["times"]["slices"]
    assert len(slices) == 3 * len(line.slices)
    name, start, duration = slices[:3]
    assert list(graph)[name] is line.slices[0].node
    assert (start, duration) == (0, round(line.slices[0].duration * 1e9))


# -- passes ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def passes() -> tuple[dict[str, Any], PassManager, list[ParallelGraph]]:
    manager = PassManager(default_pipeline(), keep=True)
    graph = manager.run(logical_step(2))
    copies = [manager.records[0].before, *(record.after for record in manager.records)]
    data = payload(graph, GraphText(graph), manager.records, manager.history)
    return data, manager, [copy for copy in copies if copy is not None]


def names_after(data: dict[str, Any], step: int) -> list[str]:
    """fx names in the order after `step` passes, as the page unpacks them."""
    runs = data["passes"]["orders"][step]
    gone = iter(data["passes"]["gone"])
    names = {n: None if place >= 0 else next(gone)[0] for n, place in enumerate(data["passes"]["place"])}
    spans = zip(runs[::2], runs[1::2], strict=True)
    return [names[n] or "" for start, length in spans for n in range(start, start + length)]


def test_the_orders_are_those_of_the_graphs_between_the_passes(
    passes: tuple[dict[str, Any], PassManager, list[ParallelGraph]],
) -> None:
    data, manager, graphs = passes
    final = {node.name for node in graphs[-1]}
    for step, graph in enumerate(graphs):
        notes = manager.history.notes
        assert [notes[n].name for n in manager.history.orders[step]] == [node.name for node in graph]
        assert [n for n in names_after(data, step) if n] == [node.name for node in graph if node.name not in final]


def test_the_counts_of_the_records_follow_from_the_orders(
    passes: tuple[dict[str, Any], PassManager, list[ParallelGraph]],
) -> None:
    _, manager, _ = passes
    history = manager.history
    for step, record in enumerate(manager.records):
        before, after = set(history.orders[step]), set(history.orders[step + 1])
        assert (len(after - before), len(before - after)) == (record.added, record.removed)
        assert len(history.moved[step]) == record.moved
    assert any(record.removed for record in manager.records)


def test_a_history_of_another_graph_is_refused(graph: ParallelGraph) -> None:
    manager = PassManager(default_pipeline())
    manager.run(logical_step(1))
    with pytest.raises(ValueError, match="which are not the"):
        to_html(graph, manager.records, manager.history)


def test_a_logical_graph_has_a_page_too() -> None:
    nodes = Nodes(sample.build_logical())
    assert nodes.kind("dispatch") is Kind.DISPATCH
    assert nodes.data["lives"] == []
