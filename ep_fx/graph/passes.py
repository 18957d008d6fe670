"""What a pass is, and the manager that runs a pipeline of them and has each result checked.

The law: a pass gets a valid graph and leaves a valid graph. It trusts the Manifest, changes nothing but the graph.

    requires   facts that must hold before: names of passes, or what these say they provide
    provides   facts that hold from then on, beside the pass's own name; each is provided once
    policies   fields of the Manifest that the options of the pass fix; a graph captured with others is refused
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import fx

from ep_fx.graph.difference import Difference, compare
from ep_fx.graph.history import History, Recorder
from ep_fx.graph.options import accepted, fits, hints, write
from ep_fx.graph.parallel_graph import ParallelGraph


class PassError(Exception):
    """A pass failed, or left a graph that a rule rejects; the message names it and the passes before it."""


class ContractError(PassError, ValueError):
    """A pipeline that cannot run: known before any of its passes does."""


@dataclass(frozen=True)
class Pass:
    """A rewrite of the graph.

    Subclasses are frozen dataclasses; their fields are the options, checked against their annotations. ``str(step)`` is
    the text of the pass in a pipeline.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for option, annotation in hints(type(self)).items():
            value = getattr(self, option)
            if not fits(annotation, value):
                raise ValueError(
                    f"pass {self.name!r}, option {option!r}: expected {accepted(annotation)}, got {value!r}"
                )

    @abstractmethod
    def apply(self, graph: ParallelGraph) -> None:
        """Rewrites `graph` in place."""

    @property
    def policies(self) -> Mapping[str, Any]:
        """Fields of the Manifest, and the value that the options of this pass give them; none by default."""
        return {}

    def __str__(self) -> str:
        options = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.init and value != option.default:
                options.append(f"{option.name}={write(value)}")
        return f"{self.name}{{{','.join(options)}}}" if options else self.name


@dataclass(frozen=True)
class PassRecord:
    """What one pass did.

    Args:
        name: the pass.
        seconds: CPU time of the rewrite.
        check_seconds: CPU time of the check that followed.
        nodes_before, nodes_after: number of nodes.
        added, removed, moved: nodes that are new, gone, and in another place among those that stayed.
        before, after: copies of the graph, where the manager was asked to keep them.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    added: int = 0
    removed: int = 0
    moved: int = 0
    check_seconds: float = 0.0
    before: ParallelGraph | None = field(default=None, repr=False, compare=False)
    after: ParallelGraph | None = field(default=None, repr=False, compare=False)


def check_contracts(passes: Sequence[Pass], holds: Iterable[str] = ()) -> frozenset[str]:
    """The facts that hold after `passes`, if each finds what it requires.

    Args:
        passes: a pipeline.
        holds: facts that hold before it.

    Raises:
        ContractError: a pass lacks what it requires, or provides what holds already.
    """
    facts = set(holds)
    for index, step in enumerate(passes):
        before = _names(passes[:index])
        if missing := sorted(step.requires - facts):
            raise ContractError(f"pass {step.name!r} requires {missing}; passes before it: {before}")
        if twice := sorted(step.provides & facts):
            raise ContractError(f"pass {step.name!r} provides {twice}, which holds already; passes before it: {before}")
        facts |= {step.name, *step.provides}
    return frozenset(facts)


def _names(passes: Sequence[Pass]) -> str:
    return ", ".join(step.name for step in passes) or "none"


@dataclass
class PassManager:
    """Runs passes in order.

    Args:
        passes: the pipeline.
        check: called on the graph after every pass; raises where a rule is broken.
        keep: whether each record holds copies of the graph from before and after its pass.
        records: what each pass did.
        history: the nodes and their order over the passes of the latest `run`.
    """

    passes: Sequence[Pass]
    check: Callable[[ParallelGraph], object] | None = None
    keep: bool = False
    records: list[PassRecord] = field(default_factory=list)
    history: History = field(default_factory=History)

    def run(self, graph: ParallelGraph) -> ParallelGraph:
        """Runs all passes on `graph`, in place.

        Raises:
            PassError: a pass lacks what it requires, raised, or broke a rule.
        """
        check_contracts(self.passes, graph.provides)
        for step in self.passes:
            _check_policies(step, graph)
        recorder = Recorder()
        self.history = recorder.history
        recorder.note(graph)
        for index, step in enumerate(self.passes):
            try:
                self.records.append(self._run(step, graph, recorder))
            except Exception as error:
                before = _names(self.passes[:index])
                raise PassError(f"pass {step.name!r} failed (passes before it: {before}):\n{error}") from error
        return graph

    def _run(self, step: Pass, graph: ParallelGraph, recorder: Recorder) -> PassRecord:
        before, copy = list(graph), graph.copy() if self.keep else None
        started = time.process_time()
        step.apply(graph)
        seconds = time.process_time() - started
        graph.graph.lint()
        graph.provides = (*graph.provides, step.name, *sorted(step.provides - {step.name}))
        difference: Difference[fx.Node] = compare(before, list(graph))
        recorder.note(graph, difference.moved)
        started = time.process_time()
        if self.check is not None:
            self.check(graph)
        return PassRecord(
            step.name,
            seconds,
            len(before),
            len(graph.graph.nodes),
            len(difference.added),
            len(difference.removed),
            len(difference.moved),
            time.process_time() - started,
            copy,
            graph.copy() if self.keep else None,
        )


def _check_policies(step: Pass, graph: ParallelGraph) -> None:
    for policy, value in step.policies.items():
        fixed = getattr(graph.manifest, policy)
        if fixed != value:
            raise ContractError(
                f"pass {str(step)!r} asks for {policy} {value!r}, the graph was captured with {fixed!r}: give the "
                f"pass to `transform`, which fixes the policy before capture, or leave the option out"
            )


def format_records(records: Sequence[PassRecord]) -> str:
    """The records as an aligned text table: time, and nodes added, removed, moved."""
    cells = [("pass", "ms", "check ms", "nodes", "added", "removed", "moved")]
    for r in records:
        times = (f"{r.seconds * 1e3:.1f}", f"{r.check_seconds * 1e3:.1f}")
        cells.append((r.name, *times, str(r.nodes_after), str(r.added), str(r.removed), str(r.moved)))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    return "\n".join(lines) + "\n"
