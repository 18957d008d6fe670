"""What runs each node on an NPU: kernels of torch_npu, operators of ATen, and what is left, with the reason.

The graph is lowered on a copy, on any machine: neither torch_npu nor a device is asked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ep_fx.explain.table import Table, fold, plain
from ep_fx.graph import ParallelGraph, Phase, info_of
from ep_fx.graph.names import value_names
from ep_fx.graph.operators import target_text
from ep_fx.graph.places import Places
from ep_fx.graph.texts import plural, source_text
from ep_fx.targets import npu
from ep_fx.targets.npu.coverage import FALLBACKS, Kind, Row

_OF_THE_RUN = re.compile(r"\bz?u\d+\b")
_TOGETHER = {Kind.ATEN: "operators of ATen", Kind.HOST: "sizes, elements of results"}
"""Kinds of which a table shows the number alone."""


@dataclass(frozen=True)
class RunTimeCondition:
    """What a kernel demands of sizes that only a run knows.

    Args:
        node, target: its name in the printed graph, and the kernel.
        expected: the argument, and what it must be.
        limit, unit: the number in it; None and empty where there is none.
        size: which size decides, as the graph has it.
        document: where this stands.
        module, source: where the node comes from.
    """

    node: str
    target: str
    expected: str
    limit: int | None
    unit: str
    size: str
    document: str
    module: str | None
    source: str | None


@dataclass(frozen=True)
class LoweringAnswer:
    """What a lowered graph consists of.

    Args:
        rows: one for each node that calls something, in order.
        conditions: those that `transform` could not decide, in the order of their nodes.
    """

    rows: tuple[Row, ...]
    conditions: tuple[RunTimeCondition, ...] = ()

    @property
    def fallbacks(self) -> tuple[Row, ...]:
        """Nodes without a kernel of the device."""
        return tuple(row for row in self.rows if row.kind in FALLBACKS)

    @property
    def is_covered(self) -> bool:
        """Whether everything inside of the MoE regions runs on the device, forward and backward."""
        return all(row.region is None for row in self.fallbacks)

    def require_kernels(self) -> None:
        """Raises `ep_fx.targets.npu.FallbackError` where that is not so, with node, module, source line and reason."""
        npu.require_kernels(self.rows)

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON knows them."""
        found: list[dict[str, Any]] = plain(self.rows)
        return found

    def conditions_to_json(self) -> list[dict[str, Any]]:
        """The conditions of the run as JSON knows them."""
        found: list[dict[str, Any]] = plain(self.conditions)
        return found

    def tables(self) -> tuple[Table, ...]:
        """How often what is called, what is left, and what depends on the sizes of a run."""
        left = (self._left(),) if self.fallbacks else ()
        return (self._calls(), *left, *((self._at_run_time(),) if self.conditions else ()))

    def __str__(self) -> str:
        return "\n".join(map(str, self.tables()))

    def _calls(self) -> Table:
        counts = Counter(((row.kind, _what(row)), row.phase, row.region is not None) for row in self.rows)
        keys = dict.fromkeys(key for key, _, _ in counts)
        rows = []
        for kind, what in sorted(keys, key=lambda key: list(Kind).index(key[0])):
            columns = [
                sum(n for (key, phase, _), n in counts.items() if key == (kind, what) and phase is half)
                for half in (Phase.FORWARD, Phase.BACKWARD)
            ]
            inside = sum(n for (key, _, within), n in counts.items() if key == (kind, what) and within)
            rows.append((what, kind.value, *map(str, columns), str(inside)))
        region = "all of it runs on the device" if self.is_covered else "NOT all of it runs on the device"
        note = f"inside: in MoE regions; {region}"
        return Table("lowering to npu", ("calls", "runs as", "forward", "backward", "inside"), tuple(rows), note)

    def _left(self) -> Table:
        rows = [
            (row.module or "-", f"%{row.node}", row.target, row.phase.value, source_text(row.source or "-"),
             "yes" if row.region else "no", row.reason or "-")
            for row in self.fallbacks
        ]  # fmt: skip
        columns = ("module", "node", "calls", "direction", "source", "inside", "why")
        return Table("left by the lowering", columns, tuple(rows), f"{plural(len(rows), 'node')} without a kernel")

    def _at_run_time(self) -> Table:
        counts = Counter(
            (c.module or "-", c.target, c.expected, _OF_THE_RUN.sub("u", c.size), c.document) for c in self.conditions
        )
        rows = fold([(*columns, str(times)) for columns, times in counts.items()])
        columns = ("module", "calls", "expected", "size", "stands in", "times")
        note = "u: a size that the exchange of a run decides; s: one of the inputs"
        return Table("conditions of the run", columns, rows, note)


def _what(row: Row) -> str:
    return _TOGETHER.get(row.kind, row.target)


def lowering_of(graph: ParallelGraph) -> LoweringAnswer:
    """Lowers a copy of `graph` and looks at what runs it."""
    lowered = npu.lower(graph)
    return LoweringAnswer(npu.coverage(lowered), tuple(_conditions(lowered)))


def _conditions(graph: ParallelGraph) -> Iterator[RunTimeCondition]:
    names = value_names(graph, Places(graph))
    for node, findings in npu.run_time_conditions(graph).items():
        info = info_of(node)
        for finding in findings:
            what, why = finding.expected, finding.condition
            yield RunTimeCondition(
                names[node], target_text(node.target), what, why.limit, why.unit, finding.got, why.source, info.fqn,
                info.source,
            )
