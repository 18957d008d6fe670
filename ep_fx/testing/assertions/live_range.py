"""`assert_live_range`: from where to where a unit's gathered weights are allocated."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ep_fx.graph import Phase, Role, info_of, role_of
from ep_fx.graph.aliases import Aliases
from ep_fx.graph.gathers import Gather, Gathers
from ep_fx.testing import select
from ep_fx.testing.assertions.matches import around, by_phase, matches_of, name_match, said
from ep_fx.testing.graph_index import GraphIndex, index_of
from ep_fx.testing.select import Match, Selector
from ep_fx.testing.selector_text import as_selector

Some = Selector | str | Sequence[Selector | str]


def assert_live_range(
    graph: Any, unit: str | Selector, *, covers: Some = (), gathered_after: Some = (), freed_before: Some = ()
) -> None:
    """Where the gathered parameters of a unit live, in each half of the graph that gathers them.

    Args:
        unit: pattern of FSDP units, or a selector of `unshard` nodes.
        covers: what lies wholly between a gather and its free.
        gathered_after: what has ended before any gather begins.
        freed_before: what begins after every free.

    A gather lives from its `unshard` to its `reshard`, and to the end where it has none.

    Raises:
        AssertionError: a range is another one, or something named here is in no half that gathers the unit.
        TypeError: nothing is asked.
    """
    __tracebackhide__ = True
    asked = [(how, s) for how, some in (("covers", covers), ("gathered_after", gathered_after),
             ("freed_before", freed_before)) for s in _listed(some)]
    if not asked:
        raise TypeError("assert_live_range takes covers=, gathered_after= or freed_before=")
    index = index_of(graph)
    chosen = select.unshard(unit) if isinstance(unit, str) else unit
    ranges = _ranges(index, chosen)
    for how, selector in asked:
        halves = by_phase(matches_of(index, selector))
        if not halves.keys() & ranges.keys():
            raise AssertionError(
                f"{selector} stands in {_words(halves)} only, and {chosen} in {_words(ranges)} only: nothing to compare"
            )
        wrong = [
            next(filter(None, (
                _wrong(index, f"{name} {_WORDS[how]} {selector} in {phase.value}", how, lives, halves[phase])
                for name, lives in ranges[phase].items()
            )), "")
            for phase in Phase if phase in halves and phase in ranges
        ]
        if any(wrong):
            raise AssertionError("\n".join(filter(None, wrong)))


_WORDS = {"covers": "gathered throughout", "gathered_after": "gathered after", "freed_before": "freed before"}


class _Life:
    """One gather of one parameter.

    Args:
        gather: the gather.
        index: of its graph.
    """

    def __init__(self, gather: Gather, index: GraphIndex) -> None:
        self.start = gather.unshard
        self.frees = sorted(gather.reshards, key=lambda node: index.of[node].position)
        self.first = index.of[gather.unshard].position
        self.last = index.of[self.frees[0]].position if self.frees else len(index.facts)

    def text(self, index: GraphIndex) -> str:
        """``%unshard_2 (forward, ..) at 40 to %..`` """
        free = f"freed at {self.last}" if self.frees else "never freed"
        return f"gathered at {self.first} by {index.name(self.start)} ({index.where(self.start)}), {free}"


def _ranges(index: GraphIndex, chosen: Selector) -> dict[Phase, dict[str, list[_Life]]]:
    """The lives of each parameter, by the half in which they begin."""
    __tracebackhide__ = True
    nodes = [node for match in matches_of(index, chosen) for node in match.nodes]
    others = [index.name(node) for node in nodes if role_of(node) is not Role.UNSHARD]
    if others:
        raise AssertionError(f"{chosen} selects more than gathers ({', '.join(others[:4])}); name a unit or unshard()")
    gathers = Gathers(index.graph.manifest, Aliases([fact.node for fact in index.facts]))
    found: dict[Phase, dict[str, list[_Life]]] = {}
    for node in nodes:
        for gather in gathers.of_unshard[node]:
            half = found.setdefault(info_of(node).phase, {})
            half.setdefault(gather.name, []).append(_Life(gather, index))
    return found


def _wrong(index: GraphIndex, wanted: str, how: str, lives: list[_Life], others: list[Match]) -> str:
    """What the failure says of one parameter in one half; nothing where it lives as it should."""
    for other in others:
        if how == "covers":
            good = any(life.first < other.first and other.last < life.last for life in lives)
        elif how == "gathered_after":
            good = all(other.last < life.first for life in lives)
        else:
            good = all(life.last < other.first for life in lives)
        if not good:
            lines = [f"expected  {wanted}", *(f"got       {life.text(index)}" for life in lives)]
            lines.append(f"          {name_match(index, other)} from {other.first} to {other.last}")
            edges = [life.start for life in lives] + [life.frees[0] for life in lives if life.frees]
            return said("wrong live range", *lines, *around(index, [*edges, other.nodes[0]]))
    return ""


def _listed(some: Some) -> list[Selector]:
    return [as_selector(s) for s in ((some,) if isinstance(some, (str, Selector)) else some)]


def _words(halves: dict[Phase, Any]) -> str:
    return " and ".join(phase.value for phase in halves)
