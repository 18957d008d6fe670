"""The rules on graphs that capture and passes make: they hold at every step, and any one act of sabotage is seen."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

import ep_fx
from ep_fx.graph import ParallelGraph, Role
from ep_fx.testing import fake_mesh
from ep_fx.verify import verify
from tests.models.tiny_moe import TinyMoE, token_ids

WAITS = (Role.WAIT, Role.UNSHARD_WAIT, Role.REDUCE_GRAD_WAIT)


class Unusual(TinyMoE):
    """Valid, and hard on the rules: no gradient for some, blocks run twice, weights in a loss, a written buffer."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.unused = nn.Parameter(torch.ones(7))
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(3))
        self.blocks[0].norm.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embedding(ids)
        for block in (*self.blocks, *self.blocks):
            h = block(h)
        self.calls[0] += 1
        with torch.no_grad():
            scale = self.temperature.exp()
        matrices = [p for p in self.parameters() if p.requires_grad and p.dim() == 2]  # experts are 3-D, and split
        decay = torch.stack([p.abs().sum() for p in matrices]).sum()
        return self.head(self.norm(h)) * scale, decay


def shared_expert() -> nn.Module:
    return TinyMoE(shared=True)


@pytest.fixture(scope="module")
def captured() -> Iterator[Any]:
    """``captured(make, **options)``: the graph of a model on a fake mesh fsdp 3 x ep 2, dense cuts uneven."""
    graphs: dict[str, ParallelGraph] = {}

    def graph(make: Callable[[], nn.Module] = shared_expert, **options: Any) -> ParallelGraph:
        key = f"{make.__name__} {options}"
        if key not in graphs:
            graphs[key] = ep_fx.transform(make(), mesh, example_inputs=(token_ids(0),), **options).graph
        return graphs[key]

    with fake_mesh(fsdp=3, ep=2) as mesh:
        yield graph


def first_input(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def copies(graph: ParallelGraph, *roles: Role) -> Iterator[tuple[ParallelGraph, fx.Node]]:
    """For each node of these roles a copy of the graph and that node in it."""
    for index in range(len([n for role in roles for n in graph.nodes(role)])):
        twin = graph.copy()
        yield twin, [n for role in roles for n in twin.nodes(role)][index]


@pytest.mark.parametrize(
    "options", [{}, {"expert_reshard": "early"}, {"reshard_after_forward": False}, {"grad_reduce": "sum"}], ids=str
)
def test_every_rule_holds(captured: Any, options: dict[str, Any]) -> None:
    report = verify(captured(**options), types=True)
    assert report.ok, report.explain()
    idle = {result.rule.id for result in report.results if result.checked == 0}
    assert idle <= ({"saved"} if "reshard_after_forward" in options else set()), str(report)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"expert_reshard": "early"}], ids=str)
def test_rules_do_not_cry_wolf(captured: Any, options: dict[str, Any]) -> None:
    graph = captured(Unusual, **options)
    assert graph.manifest.zero_gradients == ("unused", "temperature")
    assert [r.name for r in graph.manifest.regions] == ["blocks.0.moe.experts", "blocks.1.moe.experts"] * 2
    report = verify(graph, types=True)
    assert report.ok, report.explain()


def test_a_dropped_reshard_is_seen_wherever_it_is(captured: Any) -> None:
    for graph, reshard in copies(captured(), Role.RESHARD):
        graph.graph.erase_node(reshard)
        assert "once" in verify(graph).broken


def test_a_reshard_one_reader_early_is_seen_wherever_it_is(captured: Any) -> None:
    for graph, reshard in copies(captured(expert_reshard="early"), Role.RESHARD):
        value = first_input(reshard)
        readers = {user for view in [value, *value.users] for user in view.users} | set(value.users)
        positions = graph.positions()
        last = max((r for r in readers if r is not reshard and r.op != "output"), key=positions.__getitem__)
        if positions[last] < positions[reshard]:
            last.prepend(reshard)
            assert "live" in verify(graph).broken


def test_a_bypassed_wait_is_seen_wherever_it_is(captured: Any) -> None:
    for graph, wait in copies(captured(), *WAITS):
        wait.replace_all_uses_with(first_input(wait))
        graph.graph.erase_node(wait)
        assert "wait" in verify(graph).broken


def test_a_missing_division_is_seen_wherever_it_is(captured: Any) -> None:
    for graph, scale in copies(captured(), Role.SCALE_GRAD):
        scale.replace_all_uses_with(first_input(scale))
        assert "divisor" in verify(graph).broken


def test_a_zeroed_gradient_is_seen_for_every_parameter(captured: Any) -> None:
    for name in captured().gradients:
        graph = captured().copy()
        (node,) = (g for n, g in graph.gradients.items() if n == name)
        with graph.graph.inserting_before(graph.output):
            graph.set_gradients({name: graph.call(torch.ops.aten.zeros_like.default, node, like=node)})
        assert "reduce-once" in verify(graph).broken


def test_f1_a_context_of_another_layer_is_seen_on_every_edge(captured: Any) -> None:
    contexts = captured().nodes(Role.CONTEXT)
    assert len(contexts) == 2
    for index in range(len(contexts[0].users)):
        graph = captured().copy()
        first, second = graph.nodes(Role.CONTEXT)
        edge = list(second.users)[index]
        if not edge.users:
            continue
        edge.args = (first, edge.args[1])
        assert "pair" in verify(graph).broken, f"field {edge.args[1]} of the other layer's context"


def test_swapped_splits_are_seen_in_every_exchange(captured: Any) -> None:
    exchanges = 0
    for graph, exchange in copies(captured(), Role.EXCHANGE):
        x, out, into, group = exchange.args
        if not isinstance(out, fx.Node):
            continue
        exchange.args = (x, into, out, group)
        exchanges += 1
        assert "pair" in verify(graph).broken
    assert exchanges == 8
