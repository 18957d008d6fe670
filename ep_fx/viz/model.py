"""What a picture shows, free of fx and of any format: boxes and arrows.

A box stands for one node of the graph, or for several that were folded into it; `members` names them all, so that
nothing of the graph is lost. Boxes stand in an order in which every data arrow points forward.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ep_fx.graph import Phase


class Kind(Enum):
    """What a box does; decides its colour."""

    COMPUTE = "compute"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    CONTEXT = "context"
    EXCHANGE = "exchange"
    UNSHARD = "unshard"
    RESHARD = "reshard"
    REDUCE = "reduce"
    SUM = "sum"
    WAIT = "wait"
    PLACEHOLDER = "placeholder"
    OUTPUT = "output"


class EdgeKind(Enum):
    """What an arrow carries: values, the context of a dispatch, values kept for backward, or order alone."""

    DATA = "data"
    CONTEXT = "context"
    SAVED = "saved"
    EFFECT = "effect"


class Lane(Enum):
    """Strip of a column: parameters outside, compute and exchanges in the middle, dispatch contexts inside."""

    UNIT = "unit"
    MAIN = "main"
    CONTEXT = "context"


@dataclass
class PictureNode:
    """One box.

    Args:
        kind: what it does.
        phase: half of the graph, which is the column.
        lane: strip of the column.
        module: module path, unit or region; "" where none is known.
        band: block of the model that it belongs to, one horizontal band of the picture.
        title: first line.
        subtitle: second line, may be empty.
        members: names of the graph's nodes that it stands for, in order, as the text names them.
        details: what a reader sees on a closer look: (label, text) pairs.
    """

    kind: Kind
    phase: Phase
    lane: Lane
    module: str = ""
    band: str = ""
    title: str = ""
    subtitle: str = ""
    members: list[str] = field(default_factory=list)
    details: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_backward(self) -> bool:
        """Whether the box stands in the backward column."""
        return self.phase is Phase.BACKWARD


@dataclass(frozen=True)
class PictureEdge:
    """An arrow from the box with index `source` to the one with index `target`."""

    source: int
    target: int
    kind: EdgeKind


@dataclass
class Picture:
    """Boxes, arrows, a headline; whether nodes were folded."""

    title: str
    subtitle: str
    nodes: list[PictureNode]
    edges: list[PictureEdge]
    folded: bool
