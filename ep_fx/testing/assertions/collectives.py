"""`assert_collectives`: everything that a step communicates, as lines such as ``dispatch layers.0.experts over ep``."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import fx

from ep_fx.graph import info_of, is_collective
from ep_fx.graph.places import Places, group_argument
from ep_fx.graph.summary import collective_kind
from ep_fx.graph.texts import group_text
from ep_fx.testing.assertions.matches import around, said
from ep_fx.testing.graph_index import GraphIndex, index_of

Half = Literal["forward", "backward"]


def collective_lines(graph: Any, phase: Half | None = None) -> list[str]:
    """One line for each collective in order: what it is for, its unit or layer, the mesh dimensions of its group.

    Raises:
        ValueError: `phase` is neither half.
    """
    return [line for line, _ in _lines(index_of(graph), phase)]


def assert_collectives(
    graph: Any, expected: Sequence[str] | Mapping[str, int], phase: Half | None = None
) -> None:
    """The collectives of a graph are these and no others; each pattern (fnmatch) is for a whole line.

    Args:
        expected: patterns in order, one for each collective; or how many lines fit each pattern, in any order.
        phase: only this half.

    Raises:
        AssertionError: shows which are missing (``-``), and which are there beside (``+``).
        TypeError: `expected` is one text, whose letters would be taken for patterns.
        ValueError: `phase` is neither half.
    """
    __tracebackhide__ = True
    if isinstance(expected, str):
        raise TypeError(f"expected: a list of patterns or a mapping of patterns to counts, got {expected!r}")
    index = index_of(graph)
    lines = _lines(index, phase)
    where = f"the collectives of {phase}" if phase else "the collectives"
    if isinstance(expected, Mapping):
        _compare_counts(index, where, expected, lines)
    else:
        _compare_order(index, where, list(expected), lines)


def _lines(index: GraphIndex, phase: Half | None) -> list[tuple[str, fx.Node]]:
    __tracebackhide__ = True
    if phase not in (None, *get_args(Half)):
        raise ValueError(f"phase: expected {' or '.join(map(repr, get_args(Half)))} or None (both), got {phase!r}")
    places, found = Places(index.graph), []
    for fact in index.facts:
        if is_collective(fact.node) and phase in (None, info_of(fact.node).phase.value):
            over = group_text(group_argument(fact.node) or "?", index.graph.manifest.mesh)
            subject = places[fact.node].subject
            kind = collective_kind(fact.node, places).replace(" ", "_")
            parts = [kind, *([subject] if subject else []), f"over {over}"]
            found.append((" ".join(parts), fact.node))
    return found


def _compare_counts(
    index: GraphIndex, where: str, expected: Mapping[str, int], lines: list[tuple[str, fx.Node]]
) -> None:
    __tracebackhide__ = True
    counts, strays = dict.fromkeys(expected, 0), []
    for line, node in lines:
        pattern = next((p for p in expected if fnmatchcase(line, p)), None)
        if pattern is None:
            strays.append((line, node))
        else:
            counts[pattern] += 1
    wrong = [p for p in expected if counts[p] != expected[p]]
    if not wrong and not strays:
        return
    rows = [f"- {p}: expected {expected[p]}, got {counts[p]}" for p in wrong]
    rows += [f"+ {line}: expected none ({index.name(node)}, {index.where(node)})" for line, node in strays]
    raise AssertionError(said(f"{where} differ", *rows, "all of them:", *(f"  {line}" for line, _ in lines)))


def _compare_order(index: GraphIndex, where: str, expected: list[str], lines: list[tuple[str, fx.Node]]) -> None:
    __tracebackhide__ = True
    if len(lines) == len(expected) and all(fnmatchcase(a, p) for (a, _), p in zip(lines, expected, strict=True)):
        return
    rows, culprits = _difference(expected, lines)
    raise AssertionError(
        said(f"{where} differ (- expected, + got)", *rows, *(around(index, culprits[:2]) if culprits else []))
    )


def _difference(expected: list[str], lines: list[tuple[str, fx.Node]]) -> tuple[list[str], list[fx.Node]]:
    """The two lists side by side, with as many common lines as there can be; and the nodes of the surplus ones."""
    best = [[0] * (len(lines) + 1) for _ in range(len(expected) + 1)]
    for i in reversed(range(len(expected))):
        for j in reversed(range(len(lines))):
            fits = fnmatchcase(lines[j][0], expected[i])
            best[i][j] = best[i + 1][j + 1] + 1 if fits else max(best[i + 1][j], best[i][j + 1])
    rows: list[str] = []
    culprits: list[fx.Node] = []
    i = j = 0
    while i < len(expected) or j < len(lines):
        if i < len(expected) and j < len(lines) and fnmatchcase(lines[j][0], expected[i]):
            rows.append(f"  {lines[j][0]}")
            i, j = i + 1, j + 1
        elif j == len(lines) or (i < len(expected) and best[i + 1][j] >= best[i][j + 1]):
            rows.append(f"- {expected[i]}")
            i += 1
        else:
            rows.append(f"+ {lines[j][0]}")
            culprits.append(lines[j][1])
            j += 1
    return rows, culprits



