"""Colours of boxes and arrows, and what the legend says about them; shared by all formats."""
from __future__ import annotations

from typing import NamedTuple

from ep_fx.viz.model import EdgeKind, Kind


class BoxStyle(NamedTuple):
    """Look of a kind of box, and its entry in the legend ("" for none)."""

    fill: str
    stroke: str
    legend: str
    dashed: bool = False


class ArrowStyle(NamedTuple):
    """Look of a kind of arrow, and its entry in the legend."""

    stroke: str
    width: float
    dash: str
    legend: str


BOXES: dict[Kind, BoxStyle] = {
    Kind.UNSHARD: BoxStyle("#ccece3", "#007a59", "unshard: gather parameters"),
    Kind.RESHARD: BoxStyle("#fbf6b8", "#4d4500", "reshard: free them", dashed=True),
    Kind.REDUCE: BoxStyle("#fadcc8", "#b84600", "reduce gradients"),
    Kind.DISPATCH: BoxStyle("#cbe2f3", "#0072b2", "dispatch: rows to experts"),
    Kind.COMBINE: BoxStyle("#f5deeb", "#a84f82", "combine: rows back"),
    Kind.CONTEXT: BoxStyle("#fde7b5", "#c08200", "dispatch context"),
    Kind.EXCHANGE: BoxStyle("#e3f3fd", "#2b8ccb", "exchange of counts"),
    Kind.SUM: BoxStyle("#dfe3e8", "#22272e", "sum over tp: parts of experts"),
    Kind.WAIT: BoxStyle("#ffffff", "#5b6675", "wait", dashed=True),
    Kind.COMPUTE: BoxStyle("#f1f3f6", "#7b8794", "compute"),
    Kind.PLACEHOLDER: BoxStyle("#ffffff", "#3d4754", ""),
    Kind.OUTPUT: BoxStyle("#e2e8f0", "#3d4754", ""),
}
"""Hues of Okabe and Ito, which differ for every kind of colour vision: light as fill, dark enough to read as line."""

ARROWS: dict[EdgeKind, ArrowStyle] = {
    EdgeKind.DATA: ArrowStyle("#7b8794", 1.4, "", "values"),
    EdgeKind.CONTEXT: ArrowStyle("#d68a00", 2.2, "", "context of a dispatch"),
    EdgeKind.SAVED: ArrowStyle("#a9b6c6", 1.0, "", "kept for backward"),
    EdgeKind.EFFECT: ArrowStyle("#5b6675", 1.2, "4 3", "order"),
}
INK, FAINT, BAND, BAND_LINE = "#0f172a", "#4b5666", "#f1f5f9", "#d5dce5"
FONT = "'Inter', 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
