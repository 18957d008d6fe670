"""`assert_flows`: what is computed from what, along the edges of the graph."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import fx

from ep_fx.testing.assertions.matches import around, matches_of, name_match, said
from ep_fx.testing.graph_index import GraphIndex, index_of
from ep_fx.testing.select import Match, Selector
from ep_fx.testing.selector_text import as_selector

_SHOWN = 6


def assert_flows(graph: Any, *selectors: Selector | str) -> None:
    """Data flows from each match of a selector to a match of the next one, and to each of the next from one before it.

    Where both select parts of the same exchanges, they are compared within each run of a region:
    ``assert_flows(graph, "dispatch", "combine")`` is not content with the way from one layer's dispatch to the next
    layer's combine.

    Raises:
        AssertionError: there is no way, or one of them is not there.
        TypeError: fewer than two selectors.
    """
    __tracebackhide__ = True
    if len(selectors) < 2:
        raise TypeError(f"assert_flows takes two selectors or more, got {len(selectors)}")
    index = index_of(graph)
    chosen = [as_selector(selector) for selector in selectors]
    found = [matches_of(index, selector) for selector in chosen]
    for (a, sources), (b, targets) in pairwise(zip(chosen, found, strict=True)):
        shared = _runs(index, sources) & _runs(index, targets)
        for target in targets:
            known = _reach(target.nodes, forward=False)
            if not any(_meet(index, source, target, known, shared) for source in sources):
                _fail(index, f"{b} computed from {a}", target, f"is not computed from any {a}", _inputs(target))
        for source in sources:
            known = _reach(source.nodes, forward=True)
            if not any(_meet(index, target, source, known, shared) for target in targets):
                _fail(index, f"data from {a} to {b}", source, f"does not come to any {b}", _readers(source))


def _run(index: GraphIndex, match: Match) -> int | None:
    """The number of the region's run whose exchange a match is part of."""
    run = index.of[match.nodes[0]].run
    return None if run is None else run[0]


def _runs(index: GraphIndex, found: Iterable[Match]) -> set[int | None]:
    return {_run(index, match) for match in found} - {None}


def _meet(
    index: GraphIndex, other: Match, one: Match, reached: set[fx.Node], shared: set[int | None]
) -> bool:
    """Whether `other` was reached from `one`, and is of the same run where both sides have that run."""
    runs = {_run(index, other), _run(index, one)}
    if len(runs) > 1 and runs & shared:
        return False
    return any(node in reached for node in other.nodes)


def _reach(start: Iterable[fx.Node], forward: bool) -> set[fx.Node]:
    """All nodes after (or before) those of `start` along edges."""
    stack, reached = list(start), set[fx.Node]()
    while stack:
        node = stack.pop()
        for neighbour in node.users if forward else node.all_input_nodes:
            if neighbour not in reached and neighbour.op != "output":
                reached.add(neighbour)
                stack.append(neighbour)
    return reached


def _inputs(match: Match) -> list[fx.Node]:
    inside = set(match.nodes)
    return list(dict.fromkeys(i for node in match.nodes for i in node.all_input_nodes if i not in inside))


def _readers(match: Match) -> list[fx.Node]:
    inside = set(match.nodes)
    return list(dict.fromkeys(user for node in match.nodes for user in node.users if user not in inside))


def _fail(index: GraphIndex, wanted: str, match: Match, got: str, next_to: list[fx.Node]) -> None:
    __tracebackhide__ = True
    names = ", ".join(index.name(node) for node in next_to[:_SHOWN] if node.op != "output") or "nothing"
    way = "reads from" if "not computed" in got else "is read by"
    lines = [f"expected  {wanted}", f"got       {name_match(index, match)} {got}; it {way} {names}"]
    raise AssertionError(said("no flow of data", *lines, *around(index, [match.nodes[0], match.nodes[-1]])))
