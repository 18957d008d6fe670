"""Who reads a parameter, forward and backward, through views and casts: what `fsdp` must know to place its nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from ep_fx.graph import (
    ParallelGraph,
    ParameterSpec,
    Phase,
    Role,
    alias_sources,
    find_regions,
    is_backward,
    role_of,
)

aten = torch.ops.aten
_RETURNS = (Role.COMBINE, Role.DISPATCH_BACKWARD, Role.PAD_ROWS)
_CASTS = (aten._to_copy.default, aten.clone.default)


class Span(NamedTuple):
    """First and last node of a stretch of the graph, both inside."""

    first: fx.Node
    last: fx.Node


def is_size(node: fx.Node) -> bool:
    """Whether `node` is a number, such as a size of the batch that a view takes."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


class ParameterUses:
    """Uses of every parameter, found in two walks. A cast needs the gathered memory only where it is made.

    Args:
        graph: the graph, whose node order is frozen into `position`.
        nodes: placeholder of each parameter name.
    """

    def __init__(self, graph: ParallelGraph, nodes: dict[str, fx.Node]) -> None:
        self.position = graph.positions()
        self.derived: dict[fx.Node, str] = {node: name for name, node in nodes.items()}
        """Parameter of each node that is a view or a cast of it, and so can be computed again from a new gather."""
        self.parents: dict[fx.Node, fx.Node] = {}
        """What each of these, the placeholders apart, is made from."""
        self.readers: dict[tuple[str, Phase], list[fx.Node]] = {}
        """Who reads a parameter, a view or a cast of it, and so must be redirected to a gathered value."""
        self._casts: set[fx.Node] = set()
        """Derived nodes with a cast on their way: they have memory of their own."""
        self._spans: dict[tuple[str, Phase], list[fx.Node]] = {}
        """Who reads the gathered memory itself."""
        for node in graph:
            self._derive(node)
        for node in graph:
            if node.op != "output":
                self._note(node)

    def _note(self, node: fx.Node) -> None:
        sources = [a for a in node.all_input_nodes if a in self.derived]
        phase = Phase.BACKWARD if is_backward(node) else Phase.FORWARD
        for name in {self.derived[a] for a in sources}:
            self.readers.setdefault((name, phase), []).append(node)
        for name in {self.derived[a] for a in sources if a not in self._casts}:
            self._spans.setdefault((name, phase), []).append(node)

    def _derive(self, node: fx.Node) -> None:
        inputs = [a for a in node.all_input_nodes if not is_size(a)]
        if len(inputs) == 1 and inputs[0] in self.derived and (alias_sources(node) or node.target in _CASTS):
            self.derived[node] = self.derived[inputs[0]]
            self.parents[node] = inputs[0]
            if inputs[0] in self._casts or node.target in _CASTS:
                self._casts.add(node)

    def span(self, parameter: ParameterSpec, phase: Phase) -> Span | None:
        """From the first to the last reader of the gathered `parameter` in `phase`; None where nobody reads it."""
        readers = self._spans.get((parameter.name, phase))
        return Span(readers[0], readers[-1]) if readers else None

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of `node` that are parameters, or views or casts of them."""
        return [a for a in node.all_input_nodes if a in self.derived]


class Travel(NamedTuple):
    """From where on rows of a unit's experts travel, and where they are back; None where none come back."""

    first: fx.Node
    back: fx.Node | None


def travels(graph: ParallelGraph) -> dict[str, dict[Phase, Travel]]:
    """For each unit of experts, from the first exchange to the last return of its regions, in each phase.

    Nothing returns in backward where what was dispatched needs no gradient.
    """
    position = graph.positions()
    units = {region.name: region.unit for region in graph.manifest.regions}
    found: dict[str, dict[Phase, Travel]] = {}
    for region in find_regions(graph):
        unit = found.setdefault(units[region.name], {})
        for phase, members in region.members.items():
            old = unit.get(phase, Travel(members[0], None))
            returns = [n for n in (old.back, *members) if n is not None and (n is old.back or role_of(n) in _RETURNS)]
            unit[phase] = Travel(
                min(old.first, members[0], key=position.__getitem__),
                max(returns, key=position.__getitem__, default=None),
            )
    return found
