"""`assert_count`: how often something stands in the graph."""
from __future__ import annotations

from typing import Any

from ep_fx.testing.assertions.matches import around, name_matches, near_misses, said
from ep_fx.testing.graph_index import index_of
from ep_fx.testing.select import Selector
from ep_fx.testing.selector_text import as_selector


def assert_count(
    graph: Any,
    selector: Selector | str,
    count: int | None = None,
    *,
    at_least: int | None = None,
    at_most: int | None = None,
) -> None:
    """`selector` has `count` matches, or a number between the two bounds.

    Raises:
        AssertionError: another number.
        SelectorError: the selector asks for what the graph does not have at all.
        TypeError: neither a count nor a bound is given, or both.
    """
    __tracebackhide__ = True
    if (count is None) == (at_least is None and at_most is None):
        raise TypeError("assert_count takes a count, or at_least= and at_most=")
    index, chosen = index_of(graph), as_selector(selector)
    found = chosen.find(index)
    low, high = (count, count) if count is not None else (at_least or 0, at_most)
    assert low is not None
    if low <= len(found) and (high is None or len(found) <= high):
        return
    wanted = str(count) if count is not None else f"{low} or more" if high is None else f"{low} to {high}"
    lines = [f"expected  {wanted}", f"got       {len(found)}"]
    lines += name_matches(index, found) if found else near_misses(index, chosen)
    raise AssertionError(said(f"the number of matches of {chosen}", *lines, *_shown(index, found)))


def _shown(index: Any, found: Any) -> list[str]:
    return around(index, [match.nodes[0] for match in found[:2]]) if found else []
