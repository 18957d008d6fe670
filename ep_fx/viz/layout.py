"""Where boxes and arrows stand: forward runs down on the left, backward runs up beside it.

    | parameters | compute and exchanges | context |  | compute and exchanges | parameters |
                 forward, down                                  backward, up

A block of the model is one horizontal band, so that a layer's backward stands beside its forward. Rows follow the
order of the run; own code, linear but for sorting rows, no binary and no layout library.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ep_fx.viz.layered import place
from ep_fx.viz.metrics import text_width
from ep_fx.viz.model import EdgeKind, Kind, Lane, Picture, PictureNode
from ep_fx.viz.tracks import place_spine

MARGIN = 28.0
HEADER = 118.0
ROW_GAP = 26.0
BAND_HEAD, BAND_GAP = 30.0, 14.0
LANE_GAP, COLUMN_GAP = 56.0, 80.0
_WIDEST = {True: 320.0, False: 210.0}
_NARROWEST = 64.0
Point = tuple[float, float]


@dataclass
class Rect:
    """A rectangle; `x`, `y` is its upper left corner."""

    x: float
    y: float
    w: float
    h: float

    @property
    def cx(self) -> float:
        """Middle, horizontally."""
        return self.x + self.w / 2

    @property
    def cy(self) -> float:
        """Middle, vertically."""
        return self.y + self.h / 2


@dataclass
class Layout:
    """Positions of everything.

    Args:
        boxes: rectangle of each node of the picture.
        routes: for each arrow the points between its ends.
        bands: label and rectangle of each band.
        columns: label and middle of each column.
        width, height: of the whole.
    """

    boxes: list[Rect] = field(default_factory=list)
    routes: list[list[Point]] = field(default_factory=list)
    bands: list[tuple[str, Rect]] = field(default_factory=list)
    columns: list[tuple[str, float]] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0


def lay_out(picture: Picture) -> Layout:
    """Places `picture`."""
    height = 42.0 if picture.folded else 36.0
    rows, starts = _rows(picture)
    tops = _tops(starts, rows, height)
    widths = _widths(picture)
    columns = [_Column(picture, rows, widths, backward) for backward in (False, True)]
    layout = Layout(boxes=[Rect(0, 0, 0, 0) for _ in picture.nodes], routes=[[] for _ in picture.edges])
    x = MARGIN + 12
    for column in columns:
        if not column.lanes:
            continue
        left = x
        for lane in column.order:
            members, inner, points = column.lanes[lane]
            bends = [at for route in points.values() for _, at in route]
            low = min([*(c - widths[i] / 2 for i, c in zip(members, inner, strict=True)), *bends])
            high = max([*(c + widths[i] / 2 for i, c in zip(members, inner, strict=True)), *bends])
            shift = x - low
            for i, centre in zip(members, inner, strict=True):
                layout.boxes[i] = Rect(centre + shift - widths[i] / 2, tops[rows[i]], widths[i], height)
            for number, route in points.items():
                layout.routes[number] = [(at + shift, tops[row] + height / 2) for row, at in route]
            x += high - low + LANE_GAP
        x -= LANE_GAP
        layout.columns.append(("backward \u2191" if column.backward else "forward \u2193", (left + x) / 2))
        x += COLUMN_GAP
    layout.width = max(x - COLUMN_GAP + 12 + MARGIN, 760.0)
    layout.height = max((r.y + r.h for r in layout.boxes), default=HEADER) + BAND_GAP + MARGIN
    layout.bands = _band_rects(starts, rows, tops, height, layout.width)
    return layout


# -- rows --------------------------------------------------------------------------------------------------------------
def _rows(picture: Picture) -> tuple[list[int], list[tuple[str, int, int]]]:
    """Row of each box over the whole picture, and (label, first row, rows) of each band."""
    members: dict[tuple[str, bool], list[int]] = {}
    for i, node in enumerate(picture.nodes):
        members.setdefault((node.band, node.is_backward), []).append(i)
    local = _local_rows(picture)
    rows, starts, start = [0] * len(picture.nodes), [], 0
    for band in _band_order(picture.nodes):
        depths = {b: 1 + max((local[i] for i in members.get((band, b), ())), default=-1) for b in (False, True)}
        total = max(depths.values())
        for backward, depth in depths.items():
            for i in members.get((band, backward), ()):
                row = _stretched(local[i], depth, total)
                rows[i] = start + (total - 1 - row if backward else row)
        starts.append((band, start, total))
        start += total
    return rows, starts


def _stretched(row: int, depth: int, total: int) -> int:
    """Spreads the rows of the shorter column over the band, so that both begin and end together."""
    return row if depth <= 1 else round(row * (total - 1) / (depth - 1))


def _band_order(nodes: Sequence[PictureNode]) -> list[str]:
    """Bands from top to bottom: as forward runs through them, those of backward alone at the end."""
    forward = [n.band for n in nodes if not n.is_backward and n.kind is not Kind.OUTPUT]
    return list(dict.fromkeys([*forward, *(n.band for n in nodes)]))


def _local_rows(picture: Picture) -> list[int]:
    """Row of each box within its band and column, counted in the direction of the run."""
    nodes = picture.nodes
    sources: list[list[int]] = [[] for _ in nodes]
    for edge in picture.edges:
        a, b = nodes[edge.source], nodes[edge.target]
        if (a.band, a.phase) == (b.band, b.phase) and edge.source < edge.target:
            sources[edge.target].append(edge.source)
    rows = [0] * len(nodes)
    last: dict[tuple[str, bool, Lane], int] = {}
    deepest: dict[tuple[str, bool], int] = {}
    for i, node in enumerate(nodes):
        place_, lane = (node.band, node.is_backward), node.lane
        row = max((rows[s] + (nodes[s].lane is lane or not picture.folded) for s in sources[i]), default=0)
        if picture.folded and lane is not Lane.MAIN:
            row = max(row, last.get((*place_, lane), -1) + 1)
        if node.kind in (Kind.UNSHARD, Kind.OUTPUT) or (node.kind is Kind.PLACEHOLDER and lane is Lane.UNIT):
            row = max(row, deepest.get(place_, -1) + 1)           # it starts after what stands before it
        rows[i] = row
        last[(*place_, lane)] = row
        if lane is Lane.MAIN:
            deepest[place_] = max(deepest.get(place_, -1), row)
    return rows


def _tops(starts: Sequence[tuple[str, int, int]], rows: Sequence[int], height: float) -> dict[int, float]:
    """Upper edge of each row."""
    tops, y = {}, HEADER
    for _, start, total in starts:
        y += BAND_HEAD
        for row in range(start, start + total):
            tops[row] = y
            y += height + ROW_GAP
        y += BAND_GAP - ROW_GAP + 12
    return tops


def _band_rects(
    starts: Sequence[tuple[str, int, int]], rows: Sequence[int], tops: dict[int, float], height: float, width: float
) -> list[tuple[str, Rect]]:
    result = []
    for label, start, total in starts:
        top = tops[start] - BAND_HEAD
        result.append((label, Rect(MARGIN / 2, top, width - MARGIN, tops[start + total - 1] + height + 12 - top)))
    return result


# -- columns -----------------------------------------------------------------------------------------------------------
def _widths(picture: Picture) -> list[float]:
    """Width of each box: that of its text within limits; the same for all of a lane where nodes are folded."""
    limit = _WIDEST[picture.folded]
    own = [
        min(limit, max(_NARROWEST, text_width(n.title, 12.5, bold=True) + 22, text_width(n.subtitle, 10.5) + 22))
        for n in picture.nodes
    ]
    if not picture.folded:
        return own
    widest: dict[Lane, float] = {}
    for node, width in zip(picture.nodes, own, strict=True):
        widest[node.lane] = max(widest.get(node.lane, 0.0), width)
    return [widest[node.lane] for node in picture.nodes]


class _Column:
    """The lanes of one half and what stands in them: boxes, their centres, and the points of their arrows."""

    def __init__(self, picture: Picture, rows: Sequence[int], widths: Sequence[float], backward: bool) -> None:
        self.backward = backward
        self.lanes: dict[Lane, tuple[list[int], list[float], dict[int, list[tuple[int, float]]]]] = {}
        for lane in Lane:
            members = [i for i, n in enumerate(picture.nodes) if n.is_backward == backward and n.lane is lane]
            if members:
                self.lanes[lane] = self._place(picture, members, rows, widths)
        order = [lane for lane in Lane if lane in self.lanes]
        self.order = list(reversed(order)) if backward else order

    def _place(
        self, picture: Picture, members: list[int], rows: Sequence[int], widths: Sequence[float]
    ) -> tuple[list[int], list[float], dict[int, list[tuple[int, float]]]]:
        local = {i: k for k, i in enumerate(members)}
        edges = {
            number: (local[edge.source], local[edge.target])
            for number, edge in enumerate(picture.edges)
            if edge.source in local and edge.target in local and edge.kind is not EdgeKind.EFFECT
        }
        pairs = list(dict.fromkeys(edges.values()))
        put = place_spine if picture.folded else place
        centres, points = put([rows[i] for i in members], [widths[i] for i in members], pairs)
        return members, centres, {number: points[pair] for number, pair in edges.items()}
