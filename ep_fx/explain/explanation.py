"""`explain(module)`: tables of units, collectives, host syncs, kept values and peaks, and questions about one node.

Everything is read from the graph: targets, arguments, types and the Manifest. Nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from ep_fx.explain.gather import GatherAnswer, why_gather
from ep_fx.explain.gradient import GradientAnswer, gradient_of
from ep_fx.explain.lowering import LoweringAnswer, lowering_of
from ep_fx.explain.names import Subject, check_name
from ep_fx.explain.rows import PeakRow, SavedRow, SyncRow, UnitRow, peak_rows, saved_rows, sync_rows, unit_rows
from ep_fx.explain.table import Table, fold, plain
from ep_fx.explain.waiters import WaitersAnswer, waiters_of
from ep_fx.graph import ParallelGraph
from ep_fx.graph.summary import CollectiveRow, summarise
from ep_fx.graph.texts import block_of, mesh_text, plural, source_text
from ep_fx.graph.values import bytes_text
from ep_fx.runtime import EPModule
from ep_fx.verify.reduction_table import ReductionRow, reduction_table


def explain(subject: EPModule | ParallelGraph, *, sizes: Mapping[str, int] | None = None) -> Explanation:
    """What the step of a transformed module, or of a graph, does.

    Args:
        sizes: for which sizes of the inputs bytes are worked out, by their names in the printed graph:
            ``{"s0": 8, "s1": 4096}``; those that are not named are the trace's, which are small numbers.

    Raises:
        RuntimeError: the module has captured nothing yet.
        ValueError: `sizes` names none of the graph's.
    """
    return Explanation(subject.graph if isinstance(subject, EPModule) else subject, sizes)


class Explanation:
    """The tables of one graph, each made when it is first asked for; the graph must not change meanwhile.

    Args:
        graph: the graph.
        sizes: see `explain`.
    """

    def __init__(self, graph: ParallelGraph, sizes: Mapping[str, int] | None = None) -> None:
        self.graph = graph
        self._subject = Subject(graph, sizes)

    # -- data ------------------------------------------------------------------------------------------------------
    @cached_property
    def units(self) -> tuple[UnitRow, ...]:
        """FSDP units, in order."""
        return tuple(unit_rows(self._subject))

    @cached_property
    def collectives(self) -> tuple[CollectiveRow, ...]:
        """Collectives of each kind, direction and group."""
        return summarise(self.graph, self._subject.sizes)

    @cached_property
    def host_syncs(self) -> tuple[SyncRow, ...]:
        """Nodes at which the host waits for the device, in order."""
        return tuple(sync_rows(self._subject))

    @cached_property
    def saved(self) -> tuple[SavedRow, ...]:
        """Values that forward keeps for backward, in order of their first use there."""
        return tuple(saved_rows(self._subject))

    @cached_property
    def peaks(self) -> tuple[PeakRow, ...]:
        """The most gathered bytes in each half."""
        return tuple(peak_rows(self._subject))

    @cached_property
    def reductions(self) -> tuple[ReductionRow, ...]:
        """The sums and the divisor of each gradient; empty for a graph without backward."""
        return reduction_table(self.graph)

    # -- questions -------------------------------------------------------------------------------------------------
    def why(self, name: str) -> GatherAnswer:
        """Why is this gather here: answered for an unshard, its wait, or a gathered value.

        Raises:
            UnknownNameError: no such node, or no gather; the message says what was meant.
            TypeError: the name is no text.
        """
        check_name(name, "node", "unshard_2")
        return why_gather(self._subject, name)

    def waiters(self, name: str) -> WaitersAnswer:
        """Who waits for this exchange: answered for any collective, or its wait.

        Raises:
            UnknownNameError: no such node, or no collective; the message says what was meant.
            TypeError: the name is no text.
        """
        check_name(name, "node", "all_to_all_single_1")
        return waiters_of(self._subject, name)

    def gradient(self, name: str) -> GradientAnswer:
        """Which reductions does the gradient of this parameter meet, and what is its divisor.

        Raises:
            UnknownNameError: no such parameter, or one that is not trained.
            TypeError: the name is no text.
        """
        check_name(name, "parameter", "layers.0.weight")
        return gradient_of(self._subject, name)

    def lowering(self) -> LoweringAnswer:
        """What would run each node on an NPU; answered on any machine, for a graph of any target.

        A module that was transformed for another target than ``npu`` has its attention taken apart.
        """
        return lowering_of(self.graph)

    # -- forms -----------------------------------------------------------------------------------------------------
    @property
    def headline(self) -> str:
        """Mesh, number of nodes, passes."""
        ran = ", ".join(self.graph.provides) or "no pass"
        return f"{mesh_text(self.graph.manifest.mesh)}; {plural(len(self.graph.graph.nodes), 'node')}; passes: {ran}"

    def tables(self) -> tuple[Table, ...]:
        """The facts for people, layers that say the same folded."""
        return (self._units(), self._collectives(), self._syncs(), self._saved(), self._peaks(), self._reductions())

    def __str__(self) -> str:
        return "\n".join([self.headline + "\n", *map(str, self.tables())])

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON knows it, nothing folded."""
        manifest = self.graph.manifest
        return {
            "mesh": dict(manifest.mesh.sizes),
            "data_ranks": manifest.mesh.data_ranks,
            "nodes": len(self.graph.graph.nodes),
            "passes": list(self.graph.provides),
            "units": plain(self.units),
            "collectives": plain(self.collectives),
            "host_syncs": plain(self.host_syncs),
            "saved": plain(self.saved),
            "peaks": plain(self.peaks),
            "reductions": plain(self.reductions),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @property
    def _rows(self) -> str:
        """How rows are counted, where their number is known only at run time."""
        routed = any("u" in row.formula for row in self.saved)
        return "; rows counted as on balanced routing" if routed else ""

    @property
    def _sizes(self) -> str:
        """Which sizes of the inputs the bytes are worked out for, where they are free."""
        used, traced = self._subject.sizes_text
        hint = ": give your own as sizes, JSON has the formulas" if traced else ""
        return f"; sizes {used}{hint}" if used else ""

    # -- tables ----------------------------------------------------------------------------------------------------
    def _units(self) -> Table:
        rows = [
            (u.name, u.kind, str(u.parameters), _over(u.over), str(u.ranks), bytes_text(u.shard_bytes),
             bytes_text(u.full_bytes), f"{u.gathers[0]} + {u.gathers[1]}")
            for u in self.units
        ]
        columns = ("unit", "kind", "parameters", "over", "ranks", "a rank holds", "gathered", "gathers")
        total = f"a rank holds {bytes_text(sum(u.shard_bytes for u in self.units))} of parameters in all"
        return Table("units", columns, fold(rows), f"gathers: forward + backward; {total}")

    def _collectives(self) -> Table:
        rows = [
            (c.phase.value, c.kind, c.dims, "?" if c.ranks is None else str(c.ranks), str(c.count),
             "unknown" if c.typical is None else bytes_text(c.typical), "" if c.bytes is not None else c.formula)
            for c in self.collectives
        ]
        columns = ("direction", "collective", "over", "ranks", "count", "bytes a rank", "exactly")
        note = "bytes: the whole of a gather, what a rank sends in any other collective"
        free = f"; R counted as on balanced routing{self._sizes}" if any(row[6] for row in rows) else ""
        return Table("collectives", columns, tuple(rows), note + free if rows else "")

    def _syncs(self) -> Table:
        rows = [(s.module or "-", s.phase.value, s.why, source_text(s.source or "-")) for s in self.host_syncs]
        note = f"the host waits for the device {plural(len(rows), 'time')} a step"
        return Table("host syncs", ("module", "direction", "read back", "source"), fold(rows), note)

    def _saved(self) -> Table:
        blocks: dict[str, list[SavedRow]] = {}
        for row in self.saved:
            blocks.setdefault(block_of(row.module or "") or "-", []).append(row)
        rows = [(name, str(len(members)), bytes_text(_own(members))) for name, members in _in_model_order(blocks)]
        total = f"{plural(len(self.saved), 'value')}, {bytes_text(_own(self.saved))} a micro-batch"
        note = f"{total}; memory that several views share counts once, whole{self._rows}{self._sizes}"
        return Table("kept for backward", ("block", "values", "bytes"), fold(rows), note)

    def _peaks(self) -> Table:
        rows = tuple(
            (p.phase.value, bytes_text(p.bytes), str(p.units), "-" if p.node is None else f"%{p.node}", p.module or "-")
            for p in self.peaks
        )
        return Table("peak of gathered parameters", ("direction", "bytes", "units", "after", "module"), rows)

    def _reductions(self) -> Table:
        rows = [
            (r.parameter, r.kind, ", then ".join(r.steps) or "-", ",".join(r.inside) or "-", f"{r.divisor:g}")
            for r in self.reductions
        ]
        columns = ("parameter", "kind", "summed by", "by the exchange over", "divided by")
        return Table("gradients", columns, fold(rows))


def _over(dims: tuple[str, ...]) -> str:
    return ",".join(dims) or "-"


def _own(rows: Iterable[SavedRow]) -> int:
    return sum(row.kept for row in rows)


def _in_model_order(blocks: dict[str, list[SavedRow]]) -> list[tuple[str, list[SavedRow]]]:
    """Blocks in the order of the model: backward uses them last first."""
    return list(reversed(blocks.items()))

