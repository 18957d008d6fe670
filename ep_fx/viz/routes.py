"""Arrows as SVG paths: straight through rows, smooth between them, spread over the sides of their boxes."""
from __future__ import annotations

from collections.abc import Sequence

from ep_fx.viz.layout import Layout, Point, Rect
from ep_fx.viz.model import Picture, PictureEdge

_SPREAD = 14.0
"""Most pixels between two arrows on one side of a box."""


def paths(picture: Picture, layout: Layout) -> list[str]:
    """The ``d`` of each arrow, in the order of the picture's."""
    vertical = [_runs_along_lane(picture, layout, number) for number in range(len(picture.edges))]
    ports = _ports(picture, layout, vertical)
    result = []
    for number, edge in enumerate(picture.edges):
        a, b = layout.boxes[edge.source], layout.boxes[edge.target]
        if vertical[number]:
            result.append(_down(a, b, layout.routes[number], *ports[number]))
        elif abs(a.cx - b.cx) < 1 or _same_lane(picture, edge):
            result.append(_around(a, b))
        elif picture.nodes[edge.source].phase is picture.nodes[edge.target].phase and abs(a.y - b.y) > 3 * a.h:
            result.append(_through_gap(a, b, number))
        else:
            result.append(_across(a, b))
    return result


def _same_lane(picture: Picture, edge: PictureEdge) -> bool:
    a, b = picture.nodes[edge.source], picture.nodes[edge.target]
    return (a.phase, a.lane) == (b.phase, b.lane)


def _runs_along_lane(picture: Picture, layout: Layout, number: int) -> bool:
    """Whether an arrow goes from row to row of one lane, through the points that the layout found."""
    edge = picture.edges[number]
    a, b = layout.boxes[edge.source], layout.boxes[edge.target]
    if not _same_lane(picture, edge) or a.y == b.y:
        return False
    return picture.folded or bool(layout.routes[number]) or abs(a.y - b.y) < 2.6 * a.h


def _ports(picture: Picture, layout: Layout, vertical: Sequence[bool]) -> list[tuple[float, float]]:
    """x of both ends of each vertical arrow: arrows on one side stand apart, in the order of where they go."""
    sides: dict[tuple[int, bool], list[tuple[float, int, int]]] = {}
    for number, edge in enumerate(picture.edges):
        if not vertical[number]:
            continue
        a, b = layout.boxes[edge.source], layout.boxes[edge.target]
        through = sorted(layout.routes[number], key=lambda p: p[1], reverse=a.y > b.y)
        is_down = a.y < b.y
        sides.setdefault((edge.source, is_down), []).append((through[0][0] if through else b.cx, number, 0))
        sides.setdefault((edge.target, not is_down), []).append((through[-1][0] if through else a.cx, number, 1))
    ends = [[0.0, 0.0] for _ in picture.edges]
    for (box, _), users in sides.items():
        rect = layout.boxes[box]
        step = min(_SPREAD, 0.7 * rect.w / max(1, len(users)))
        for place, (_, number, end) in enumerate(sorted(users)):
            ends[number][end] = rect.cx + (place - (len(users) - 1) / 2) * step
    return [(first, second) for first, second in ends]


def _down(a: Rect, b: Rect, route: Sequence[Point], start: float, end: float) -> str:
    """From the lower side of the upper box through the points, or the other way round where the run goes up."""
    down = a.y < b.y
    sign = 1 if down else -1
    points = sorted(route, key=lambda p: p[1], reverse=not down)
    x, y = start, a.y + a.h if down else a.y
    text = f"M{x:.1f},{y:.1f}"
    for px, py in points:
        text += _curve(x, y, px, py - sign * a.h / 2) + f"L{px:.1f},{py + sign * a.h / 2:.1f}"
        x, y = px, py + sign * a.h / 2
    return text + _curve(x, y, end, b.y if down else b.y + b.h)


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (y1 + y2) / 2
    return f"C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}"


def _across(a: Rect, b: Rect) -> str:
    """From the near side of one box to the near side of the other, level at both ends."""
    right = b.cx > a.cx
    x1, x2 = (a.x + a.w, b.x) if right else (a.x, b.x + b.w)
    bend = max(18.0, abs(x2 - x1) / 2)
    bend = bend if right else -bend
    return f"M{x1:.1f},{a.cy:.1f}C{x1 + bend:.1f},{a.cy:.1f} {x2 - bend:.1f},{b.cy:.1f} {x2:.1f},{b.cy:.1f}"


def _through_gap(a: Rect, b: Rect, number: int) -> str:
    """Along the gap between two lanes, on the side of the box in the narrow one, with round corners."""
    right = b.cx > a.cx
    x1, x2 = (a.x + a.w, b.x) if right else (a.x, b.x + b.w)
    sign, down = (1 if right else -1), (1 if b.y > a.y else -1)
    outer = x1 if a.w != b.w and right == (a.cx < b.cx) else x2
    x = outer + sign * (14 + 5 * (number % 5)) if outer == x1 else x2 - sign * (14 + 5 * (number % 5))
    r = 10
    return (
        f"M{x1:.1f},{a.cy:.1f}H{x - sign * r:.1f}Q{x:.1f},{a.cy:.1f} {x:.1f},{a.cy + down * r:.1f}"
        f"V{b.cy - down * r:.1f}Q{x:.1f},{b.cy:.1f} {x + sign * r:.1f},{b.cy:.1f}H{x2:.1f}"
    )


def _around(a: Rect, b: Rect) -> str:
    """A bow on the outer side, for boxes above one another that are far apart."""
    x = max(a.x + a.w, b.x + b.w)
    bend = x + 20 + min(60.0, abs(b.cy - a.cy) / 20)
    return f"M{a.x + a.w:.1f},{a.cy:.1f}C{bend:.1f},{a.cy:.1f} {bend:.1f},{b.cy:.1f} {b.x + b.w:.1f},{b.cy:.1f}"
