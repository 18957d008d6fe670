"""A spine of boxes with straight tracks beside it, for long arrows.

Boxes that share a row stand side by side around the middle. An arrow over several rows runs down a vertical track next
to the boxes that it passes, on the side where it stays closer, and never on another arrow's track.
"""
from __future__ import annotations

from collections.abc import Sequence

from ep_fx.viz.layered import GAP

_FIRST, _STEP = 14.0, 8.0
Points = dict[tuple[int, int], list[tuple[int, float]]]


def place_spine(
    rows: Sequence[int], widths: Sequence[float], edges: Sequence[tuple[int, int]]
) -> tuple[list[float], Points]:
    """Centres of the boxes, and for each arrow the (row, x) points at both ends of its track.

    Args:
        rows: row of each box.
        widths: width of each box.
        edges: pairs of boxes.
    """
    centres = _side_by_side(rows, widths)
    reach: dict[int, tuple[float, float]] = {}
    for row, centre, width in zip(rows, centres, widths, strict=True):
        left, right = reach.get(row, (0.0, 0.0))
        reach[row] = (min(left, centre - width / 2), max(right, centre + width / 2))
    points: Points = {edge: [] for edge in edges}
    taken: list[tuple[int, int, float]] = []
    for edge in sorted(edges, key=lambda e: (abs(rows[e[0]] - rows[e[1]]), e)):
        first, last = sorted((rows[edge[0]], rows[edge[1]]))
        if last - first < 2:
            continue
        passed = [reach[row] for row in range(first + 1, last) if row in reach]
        if not passed:
            continue
        x = min(
            _free(-1, min(left for left, _ in passed) - _FIRST, first, last, taken),
            _free(1, max(right for _, right in passed) + _FIRST, first, last, taken),
            key=abs,
        )
        taken.append((first, last, x))
        points[edge] = [(first + 1, x), (last - 1, x)]
    return centres, points


def _side_by_side(rows: Sequence[int], widths: Sequence[float]) -> list[float]:
    """The first box of a row in the middle, the others to its right."""
    centres, ends = [], dict[int, float]()
    for row, width in zip(rows, widths, strict=True):
        centres.append(0.0 if row not in ends else ends[row] + GAP + width / 2)
        ends[row] = centres[-1] + width / 2
    return centres


def _free(side: int, x: float, first: int, last: int, taken: Sequence[tuple[int, int, float]]) -> float:
    """The nearest place from `x` outwards that no arrow of overlapping rows uses."""
    used = [at for start, end, at in taken if start < last and first < end]
    while any(abs(at - x) < _STEP - 0.5 for at in used):
        x += side * _STEP
    return x
