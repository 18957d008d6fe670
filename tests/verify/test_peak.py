"""Rule `peak`: gathers ahead of their use. Numbers cannot show it, so each test moves nodes of a valid graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep_fx.graph import ParallelGraph, Role
from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, name_of
from tests.verify.builder import Step


def _hoist(graph: ParallelGraph, count: int) -> ParallelGraph:
    """Moves the first `count` gathers of forward, with their waits, to the first of them."""
    unshards = graph.nodes(Role.UNSHARD)
    for later in unshards[1:count]:
        last = unshards[0]
        while last.next in unshards[:count]:
            last = last.next
        last.append(later)
    return graph


def test_a_valid_graph_gathers_nothing_ahead() -> None:
    result = verify(Step().graph, ["peak"])
    assert result.ok, result.explain()
    assert result.of("peak").checked > 0


@pytest.mark.parametrize("count", [2, 3])
def test_gathers_hoisted_to_the_top_break_peak_only(count: int) -> None:
    """The bug that gradients cannot show: every number stays right."""
    graph = _hoist(Step().graph, count)
    graph.graph.lint()
    assert verify(graph).broken == ("peak",)


def test_a_prefetch_of_one_is_fine_where_the_manifest_allows_it() -> None:
    graph = _hoist(Step().graph, 2)
    graph.manifest = replace(graph.manifest, prefetch_depth=1)
    assert verify(graph).ok
    deeper = _hoist(Step().graph, 3)
    deeper.manifest = replace(deeper.manifest, prefetch_depth=1)
    assert verify(deeper).broken == ("peak",)


broken = Breaks("peak")


@broken()
@broken(policy="early")
def all_gathers_at_the_top(step: Step) -> None:
    _hoist(step.graph, 3)


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_broken(case: Case) -> None:
    case.run()
