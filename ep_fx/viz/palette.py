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
    Kind.UNSHARD: BoxStyle("#d1fae5", "#059669", "unshard: gather parameters"),
    Kind.RESHARD: BoxStyle("#f5f5f4", "#78716c", "reshard: free them", dashed=True),
    Kind.REDUCE: BoxStyle("#ffe4e6", "#e11d48", "reduce gradients"),
    Kind.DISPATCH: BoxStyle("#dbeafe", "#2563eb", "dispatch: rows to experts"),
    Kind.COMBINE: BoxStyle("#ede9fe", "#7c3aed", "combine: rows back"),
    Kind.CONTEXT: BoxStyle("#fef3c7", "#d97706", "dispatch context"),
    Kind.EXCHANGE: BoxStyle("#cffafe", "#0891b2", "other exchange"),
    Kind.SUM: BoxStyle("#fae8ff", "#c026d3", "sum over tp: parts of experts"),
    Kind.WAIT: BoxStyle("#ffffff", "#64748b", "wait", dashed=True),
    Kind.COMPUTE: BoxStyle("#f8fafc", "#94a3b8", "compute"),
    Kind.PLACEHOLDER: BoxStyle("#ffffff", "#475569", ""),
    Kind.OUTPUT: BoxStyle("#e2e8f0", "#475569", ""),
}

ARROWS: dict[EdgeKind, ArrowStyle] = {
    EdgeKind.DATA: ArrowStyle("#94a3b8", 1.4, "", "values"),
    EdgeKind.CONTEXT: ArrowStyle("#d97706", 1.8, "", "context, dispatch to combine and backward"),
    EdgeKind.SAVED: ArrowStyle("#cbd5e1", 1.0, "", "kept for backward"),
    EdgeKind.EFFECT: ArrowStyle("#78716c", 1.2, "4 3", "order: must wait for"),
}
INK, FAINT, BAND, BAND_LINE = "#0f172a", "#64748b", "#f1f5f9", "#e2e8f0"
FONT = "'Inter', 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
