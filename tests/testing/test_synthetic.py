"""Synthetic steps are valid under every rule, of every size, and cost what their size says."""

from __future__ import annotations

import gc
import time

import pytest

from ep_fx.graph import Role, graph_equal, parse_graph, print_graph
from ep_fx.testing.synthetic import Sizes, layers_for, logical_step, parallel_step
from ep_fx.verify import verify

SIZES = [
    Sizes(), Sizes(fsdp=3), Sizes(fsdp=1, ep=1), Sizes(replicate=2), Sizes(fsdp=1), Sizes(ep=1),
    Sizes(fsdp=3, ep=4, experts=4), Sizes(replicate=2, fsdp=5, ep=2, width=48, top_k=1),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{s.replicate}x{s.fsdp}x{s.ep}")
def test_every_rule_holds_before_and_after_the_passes(sizes: Sizes) -> None:
    for graph in (logical_step(2, sizes), parallel_step(2, sizes)):
        report = verify(graph, types=True)
        assert report.ok, report.explain()
        assert report.of("computes").checked == len(graph.manifest.trainable) + 1


def test_the_number_of_nodes_follows_from_the_number_of_layers() -> None:
    counts = [len(parallel_step(layers).graph.nodes) for layers in (1, 2, 7)]
    assert counts == [26 + 146 * layers for layers in (1, 2, 7)]
    assert [layers_for(nodes) for nodes in (10, 1_000, 10_000, 100_000)] == [1, 7, 68, 685]


def test_each_layer_has_a_region_of_its_own() -> None:
    graph = parallel_step(3)
    assert [r.name for r in graph.manifest.regions] == [f"layers.{i}.experts" for i in range(3)]
    assert len(graph.nodes(Role.CONTEXT)) == 3
    assert len(graph.nodes(Role.EXCHANGE)) == 3 * (1 + 4)


def test_two_are_equal_and_go_through_text() -> None:
    graph = parallel_step(2, Sizes(fsdp=3))
    assert graph_equal(graph, parallel_step(2, Sizes(fsdp=3)))
    assert graph_equal(graph, parse_graph(print_graph(graph)))


def test_writing_passes_and_rules_take_time_in_proportion_to_the_nodes() -> None:
    """Ten times the nodes take ten times as long; quadratic parts would take a hundred times. A warm-up comes first."""
    parallel_step(1)
    small, large = _seconds(12), _seconds(120)
    assert large < 25 * small


def _seconds(layers: int) -> float:
    gc.disable()
    started = time.process_time()
    verify(parallel_step(layers)).raise_if_broken()
    seconds = time.process_time() - started
    gc.enable()
    return seconds
