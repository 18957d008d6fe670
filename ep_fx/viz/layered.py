"""Placing boxes within given rows: few crossings, straight lines, no overlap.

The last two steps of a layered (Sugiyama) drawing, for rows that are known: order each row by the mean place of its
neighbours, then find x positions closest to those of the neighbours that keep the gaps. Arrows over several rows run
through invisible points of their own. A fixed number of sweeps, each linear but for sorting a row.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP = 18.0
_SWEEPS = 6
_LONGEST = 40
"""An arrow over more rows gets no points of its own: it is drawn as one curve."""
_POINT_WIDTH = 10.0


@dataclass
class Item:
    """A box, or a point that a long arrow runs through."""

    row: int
    width: float
    x: float = 0.0
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)


def place(
    rows: Sequence[int], widths: Sequence[float], edges: Sequence[tuple[int, int]]
) -> tuple[list[float], dict[tuple[int, int], list[tuple[int, float]]]]:
    """Centres of the boxes, and for each arrow the (row, x) points that it runs through between its ends.

    Args:
        rows: row of each box.
        widths: width of each box.
        edges: pairs of boxes.
    """
    items = [Item(row, width) for row, width in zip(rows, widths, strict=True)]
    chains: dict[tuple[int, int], list[int]] = {}
    for source, target in edges:
        chain = _chain(items, source, target)
        chains[source, target] = chain[1:-1]
        for upper, lower in pairwise(chain):
            items[upper].below.append(lower)
            items[lower].above.append(upper)
    table: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        table.setdefault(item.row, []).append(index)
    levels = [table[row] for row in sorted(table)]
    for level in levels:
        _pack(items, level)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for level in levels if down else reversed(levels):
            _order(items, level, down)
            _pack(items, level)
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for level in levels if down else reversed(levels):
            _settle(items, level, None if sweep > 2 else down)
    centres = [item.x for item in items[: len(rows)]]
    return centres, {edge: [(items[i].row, items[i].x) for i in chain] for edge, chain in chains.items()}


def _chain(items: list[Item], source: int, target: int) -> list[int]:
    """The box, the points, the box of one arrow, from the upper row to the lower; points are added to `items`."""
    upper, lower = (source, target) if items[source].row <= items[target].row else (target, source)
    distance = items[lower].row - items[upper].row
    if distance == 0 or distance > _LONGEST:
        return []
    points = []
    for row in range(items[upper].row + 1, items[lower].row):
        items.append(Item(row, _POINT_WIDTH))
        points.append(len(items) - 1)
    return [upper, *points, lower]


def _order(items: list[Item], level: list[int], down: bool) -> None:
    def key(index: int) -> float:
        neighbours = items[index].above if down else items[index].below
        return sum(items[n].x for n in neighbours) / len(neighbours) if neighbours else items[index].x

    level.sort(key=key)


def _pack(items: list[Item], level: list[int]) -> None:
    """Side by side, the row centred on 0."""
    x = -sum(items[i].width + GAP for i in level) / 2
    for i in level:
        items[i].x = x + (items[i].width + GAP) / 2
        x += items[i].width + GAP


def _settle(items: list[Item], level: list[int], down: bool | None) -> None:
    """Moves a row to where its neighbours want it, keeping its order and the gaps (least squares)."""
    offsets, wishes = [], []
    offset = 0.0
    for place_in_row, i in enumerate(level):
        item = items[i]
        if place_in_row:
            offset += (items[level[place_in_row - 1]].width + item.width) / 2 + GAP
        sides = {None: item.above + item.below, True: item.above, False: item.below}[down]
        wish = sum(items[n].x for n in sides) / len(sides) if sides else item.x
        offsets.append(offset)
        wishes.append(wish - offset)
    for i, x, shift in zip(level, _isotonic(wishes), offsets, strict=True):
        items[i].x = x + shift


def _isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence closest to `values` (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            more, number = blocks.pop()
            total, count = total + more, count + number
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]
