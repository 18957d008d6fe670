"""`assert_flows`: what is computed from what, along the edges of the graph."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx

from ep_fx.testing.assertions.matches import around, matches_of, name_match, said
from ep_fx.testing.assertions.rows import Half, carries, half_of
from ep_fx.testing.graph_index import GraphIndex, index_of
from ep_fx.testing.select import Match, Selector
from ep_fx.testing.selector_text import as_selector

_SHOWN = 6


def assert_flows(graph: Any, *selectors: Selector | str) -> None:
    """Data flows from each match of a selector to a match of the next one, and to each of the next from one before it.

    Between halves of exchanges, and between them and `grouped_mm`, data are rows: sizes, indices and counts are no way.
    Where both select halves of the same exchanges, the halves also share one context, and no other exchange lies on the
    way: ``assert_flows(graph, "dispatch", "combine")`` is not content with the way from one layer's dispatch to the
    next layer's combine. From forward to backward, where gradients begin at the tangents, any way will do.

    Raises:
        AssertionError: there is no way, or one of them is not there; for halves it says whether the rows or the context
            are missing.
        TypeError: fewer than two selectors.
    """
    __tracebackhide__ = True
    if len(selectors) < 2:
        raise TypeError(f"assert_flows takes two selectors or more, got {len(selectors)}")
    index = index_of(graph)
    chosen = [as_selector(selector) for selector in selectors]
    found = [matches_of(index, selector) for selector in chosen]
    for (a, sources), (b, targets) in pairwise(zip(chosen, found, strict=True)):
        shared = bool(_runs(index, sources) & _runs(index, targets))
        halves = _halves(index, (a, sources), (b, targets))
        ways = _Ways(index, shared, halves)
        for target in targets:
            links = [ways.to_target(source, target) for source in sources]
            if not any(link.rows and link.context for link in links):
                got = _got(_said(index, sources), links, f"is not computed from any {a}", ("has", "of"), ways)
                _fail(index, f"{b} computed from {a}", target, got, _inputs(target), "reads from")
        for source in sources:
            links = [ways.from_source(source, target) for target in targets]
            if not any(link.rows and link.context for link in links):
                got = _got(_said(index, targets), links, f"does not come to any {b}", ("gives", "to"), ways)
                _fail(index, f"data from {a} to {b}", source, got, _readers(source), "is read by")


class _Link(NamedTuple):
    """What two matches have in common."""

    rows: bool
    context: bool


def _halves(index: GraphIndex, *selected: tuple[Selector, list[Match]]) -> dict[Match, Half]:
    """Where rows pass through each match, if both selectors take halves or products, and one of them halves."""
    if not any(selector.groups for selector, _ in selected):
        return {}
    halves = {match: half_of(index, match) for _, found in selected for match in found}
    known = {match: half for match, half in halves.items() if half is not None}
    return known if len(known) == len(halves) else {}


class _Ways:
    """Whether data of one match come to another one.

    Args:
        shared: both are parts of the same exchanges.
        halves: where rows pass through the matches; empty: any value is as good as rows.
    """

    def __init__(self, index: GraphIndex, shared: bool, halves: Mapping[Match, Half]) -> None:
        self.index, self.shared, self.halves = index, shared, halves
        self._known: dict[tuple[Match, bool], set[fx.Node]] = {}

    def to_target(self, source: Match, target: Match) -> _Link:
        """Whether all that leaves `target` comes from `source`."""
        if not self.halves or self._turns(source, target):
            return self._any(source, target, self._reached(target, False))
        a, b = self.halves[source], self.halves[target]
        come = {end for start in a.exchanges for end in carries(a, b, start, self.shared)}
        return _Link(bool(come) and come == b.ends, self._same_context(source, target))

    def from_source(self, source: Match, target: Match) -> _Link:
        """Whether all that `source` exchanges comes to `target`."""
        if not self.halves or self._turns(source, target):
            return self._any(target, source, self._reached(source, True))
        a, b = self.halves[source], self.halves[target]
        good = bool(a.exchanges) and all(carries(a, b, start, self.shared) for start in a.exchanges)
        return _Link(good, self._same_context(source, target))

    def _any(self, other: Match, one: Match, reached: set[fx.Node]) -> _Link:
        way = any(node in reached for node in other.nodes)
        if self.halves:
            return _Link(way, self._same_context(other, one))
        runs = {_run(self.index, other), _run(self.index, one)}
        return _Link(way, not self.shared or len(runs) == 1)

    def _turns(self, source: Match, target: Match) -> bool:
        """Whether the way leads from forward to backward."""
        return self.halves[source].backward is not self.halves[target].backward

    def _same_context(self, source: Match, target: Match) -> bool:
        both = self.halves[source].contexts, self.halves[target].contexts
        return not self.shared or (len(both[0]) == 1 and both[0] == both[1])

    def _reached(self, match: Match, forward: bool) -> set[fx.Node]:
        if (match, forward) not in self._known:
            self._known[match, forward] = _reach(match.nodes, forward)
        return self._known[match, forward]


def _got(others: list[str], links: list[_Link], nothing: str, words: tuple[str, str], ways: _Ways) -> str:
    """What is not there: rows, the context, or both of one match."""
    verb, of = words
    rows = [other for other, link in zip(others, links, strict=True) if link.rows]
    contexts = [other for other, link in zip(others, links, strict=True) if link.context]
    if not ways.halves or not ways.shared:
        return nothing
    if rows and contexts:
        return f"{nothing}: it {verb} the rows {of} {rows[0]}, but the context {of} {contexts[0]}"
    if rows:
        return f"{nothing}: it {verb} the rows {of} {rows[0]}, but not its context, or not alone"
    if contexts:
        return f"{nothing}: it {verb} the context {of} {contexts[0]}, but not its rows"
    return f"{nothing}: neither rows nor context"


def _run(index: GraphIndex, match: Match) -> int | None:
    """The number of the region's run whose exchange a match is part of."""
    run = index.of[match.nodes[0]].run
    return None if run is None else run[0]


def _runs(index: GraphIndex, found: Iterable[Match]) -> set[int | None]:
    return {_run(index, match) for match in found} - {None}


def _said(index: GraphIndex, found: Iterable[Match]) -> list[str]:
    return [name_match(index, match) for match in found]


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


def _fail(index: GraphIndex, wanted: str, match: Match, got: str, next_to: list[fx.Node], way: str) -> None:
    __tracebackhide__ = True
    names = ", ".join(index.name(node) for node in next_to[:_SHOWN] if node.op != "output") or "nothing"
    lines = [f"expected  {wanted}", f"got       {name_match(index, match)} {got}; it {way} {names}"]
    raise AssertionError(said("no flow of data", *lines, *around(index, [match.nodes[0], match.nodes[-1]])))
