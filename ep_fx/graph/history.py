"""Which nodes a pipeline saw, and in which order they stood before its first pass and after each: what "what did this
pass change" is answered from, once the passes are over.

A node keeps its number however often it moves; one that a pass erased keeps its note. 4 bytes a node and pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from ep_fx.graph.info import Phase, info_of
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import target_name


class Note(NamedTuple):
    """What is remembered of a node: its fx name, the schema name of its target, its half, its module path."""

    name: str
    target: str
    phase: Phase
    fqn: str | None


@dataclass
class History:
    """The nodes of a graph over a pipeline.

    Args:
        notes: of every node that ever stood in the graph, by number.
        orders: the numbers in the order of the graph, before the first pass and after each.
        moved: for each pass the numbers of the nodes that stayed but changed place.
    """

    notes: list[Note] = field(default_factory=list)
    orders: list[array[int]] = field(default_factory=list)
    moved: list[array[int]] = field(default_factory=list)


class Recorder:
    """Writes a `History` while passes run; holds the nodes, so that no two have one identity."""

    def __init__(self) -> None:
        self.history = History()
        self._numbers: dict[fx.Node, int] = {}

    def note(self, graph: ParallelGraph, moved: Iterable[fx.Node] | None = None) -> None:
        """Enters the order of `graph` as it stands, and what the pass before it moved; None before the first."""
        self.history.orders.append(array("i", map(self._number, graph)))
        if moved is not None:
            self.history.moved.append(array("i", map(self._number, moved)))

    def _number(self, node: fx.Node) -> int:
        known = self._numbers.get(node)
        if known is not None:
            return known
        info = info_of(node)
        self._numbers[node] = len(self.history.notes)
        self.history.notes.append(Note(node.name, target_name(node), info.phase, info.fqn))
        return self._numbers[node]
