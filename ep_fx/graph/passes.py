"""What a pass is, and the manager that runs a pipeline of them and has each result checked.

The law: a pass gets a valid graph and leaves a valid graph. It trusts the Manifest, changes nothing but the graph.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ep_fx.graph.parallel_graph import ParallelGraph


class PassError(Exception):
    """A pass failed, or left a graph that a rule rejects; the message names it and the passes before it."""


@dataclass(frozen=True)
class Pass:
    """A rewrite of the graph.

    Subclasses are frozen dataclasses; their fields are the options.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def apply(self, graph: ParallelGraph) -> None:
        """Rewrites `graph` in place."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its name, seconds of CPU, and the number of nodes before and after."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass
class PassManager:
    """Runs passes in order.

    Args:
        passes: the pipeline.
        check: called on the graph after every pass; raises where a rule is broken.
    """

    passes: Sequence[Pass]
    check: Callable[[ParallelGraph], object] | None = None
    records: list[PassRecord] = field(default_factory=list)

    def run(self, graph: ParallelGraph) -> ParallelGraph:
        """Runs all passes on `graph`, in place.

        Raises:
            PassError: a pass lacks what it requires, raised, or broke a rule.
        """
        for index, step in enumerate(self.passes):
            before = [p.name for p in self.passes[:index]]
            missing = step.requires - set(graph.provides)
            if missing:
                raise PassError(f"pass {step.name!r} requires {sorted(missing)}; passes that ran: {before or 'none'}")
            started, count = time.process_time(), len(graph.graph.nodes)
            try:
                step.apply(graph)
                graph.graph.lint()
                graph.provides = (*graph.provides, step.name)
                if self.check is not None:
                    self.check(graph)
            except Exception as error:
                raise PassError(
                    f"pass {step.name!r} failed (passes before it: {before or 'none'}):\n{error}"
                ) from error
            self.records.append(PassRecord(step.name, time.process_time() - started, count, len(graph.graph.nodes)))
        return graph
