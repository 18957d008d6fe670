"""Colours: texts stand out from every fill, and kinds stay apart for each kind of colour vision."""
from __future__ import annotations

from itertools import combinations

import pytest

from ep_fx.viz.model import Kind
from ep_fx.viz.palette import ARROWS, BOXES, FAINT, INK

VISION = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red cones": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green cones": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue cones": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Simulation of Machado, Oliveira and Fernandes (2009), full severity, on linear RGB."""
Color = tuple[float, float, float]
COLOURED = [Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE, Kind.DISPATCH, Kind.COMBINE, Kind.CONTEXT, Kind.SUM]


def linear(color: str) -> Color:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return r, g, b


def luminance(color: str) -> float:
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def lab(color: Color) -> Color:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(m * c for m, c in zip(row, color, strict=True)) / w for row, w in zip(rows, white, strict=True)]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * max(t, 0.0) + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(color: str, vision: str) -> Color:
    r, g, b = (sum(m * c for m, c in zip(row, linear(color), strict=True)) for row in VISION[vision])
    return lab((r, g, b))


@pytest.mark.parametrize("kind", BOXES)
def test_texts_and_rims_stand_out(kind: Kind) -> None:
    assert contrast(INK, BOXES[kind].fill) > 7
    assert contrast(FAINT, BOXES[kind].fill) > 4.5
    assert contrast(BOXES[kind].stroke, "#ffffff") > 3


@pytest.mark.parametrize("vision", VISION)
def test_rims_of_the_kinds_that_colour_tells_apart_differ_for_everyone(vision: str) -> None:
    for a, b in combinations(COLOURED, 2):
        pair = zip(seen(BOXES[a].stroke, vision), seen(BOXES[b].stroke, vision), strict=True)
        assert sum((p - q) ** 2 for p, q in pair) ** 0.5 > 10, (a, b)


def test_arrows_differ_in_colour_or_dash() -> None:
    assert len({(arrow.stroke, arrow.dash) for arrow in ARROWS.values()}) == len(ARROWS)
