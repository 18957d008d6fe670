"""`assert_before`: what stands before what, in each half of the graph."""
from __future__ import annotations

from typing import Any

from ep_fx.testing.assertions.matches import around, by_phase, matches_of, name_match, said
from ep_fx.testing.graph_index import GraphIndex, index_of
from ep_fx.testing.select import Match, Selector
from ep_fx.testing.selector_text import as_selector


def assert_before(graph: Any, first: Selector | str, then: Selector | str) -> None:
    """In every half of the graph that has both, all matches of `first` end before any match of `then` begins.

    Where no half has both, they are compared over the whole graph, in which forward comes before backward.

    Raises:
        AssertionError: another order, or one of the two is not there.
    """
    __tracebackhide__ = True
    index, a, b = index_of(graph), as_selector(first), as_selector(then)
    before, after = matches_of(index, a), matches_of(index, b)
    halves_a, halves_b = by_phase(before), by_phase(after)
    both = [phase for phase in halves_a if phase in halves_b]
    for phase in both:
        _check(index, f"{a} before {b} in {phase.value}", halves_a[phase], halves_b[phase])
    if not both:
        _check(index, f"{a} before {b}", before, after)


def _check(index: GraphIndex, wanted: str, before: list[Match], after: list[Match]) -> None:
    __tracebackhide__ = True
    late, early = max(before, key=lambda m: m.last), min(after, key=lambda m: m.first)
    if late.last < early.first:
        return
    lines = [
        f"expected  {wanted}",
        f"got       {name_match(index, late)} ends at {late.last}",
        f"          {name_match(index, early)} begins at {early.first}",
    ]
    raise AssertionError(said("wrong order", *lines, *around(index, [late.nodes[-1], early.nodes[0]])))
