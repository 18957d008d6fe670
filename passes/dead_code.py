"""Remove what nobody reads and what has no effect.

Buffer updates, collectives, reshards and contexts stay, read or not: removing one on one rank would leave the others
waiting. One walk from the end.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ep_fx.graph import ParallelGraph, Pass


@dataclass(frozen=True)
class DeadCode(Pass):
    """Dead-code removal that keeps effects."""

    name: ClassVar[str] = "dead-code"

    def apply(self, graph: ParallelGraph) -> None:
        """Erases dead nodes until none is left."""
        graph.remove_dead_code()
