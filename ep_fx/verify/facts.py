"""What several rules need to know of a graph, computed once: order, aliases, gathers, where backward begins.

Everything comes from targets, arguments and the Manifest. NodeInfo is read for error messages only. Each fact is one
walk over the nodes, done when the first rule asks for it.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import fx

from ep_fx.graph import ParallelGraph, ParameterSpec, Role
from ep_fx.graph.aliases import Aliases
from ep_fx.graph.gathers import Gathers
from ep_fx.graph.phases import Boundary, boundary, tangent_dependents
from ep_fx.graph.table import NodeTable
from ep_fx.verify.reductions import GradientPath, due_dims, gradient_path
from ep_fx.verify.regions import Regions

_NO_PARAMETERS: dict[str, ParameterSpec] = {}


class Facts:
    """Facts of one graph, which must not change while they are in use.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: ParallelGraph) -> None:
        self.graph = graph
        self.manifest = graph.manifest
        self.sharded = "fsdp" in graph.provides
        """Whether the parameter placeholders are shards."""
        self.checked = 0
        """How many facts the running rule has looked at."""

    # -- order -----------------------------------------------------------------------------------------------------
    @cached_property
    def table(self) -> NodeTable:
        """All nodes, in order, with their kinds and whom they read."""
        return NodeTable(self.graph)

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes, in order."""
        return self.table.nodes

    @property
    def position(self) -> dict[fx.Node, int]:
        """Place of each node."""
        return self.table.position

    @property
    def misplaced(self) -> list[tuple[fx.Node, fx.Node]]:
        """(source, reader) of each edge whose source does not stand before its reader."""
        return self.table.misplaced

    @cached_property
    def _sorted(self) -> tuple[dict[Role, list[fx.Node]], list[fx.Node], list[fx.Node]]:
        by_role: dict[Role, list[fx.Node]] = {role: [] for role in Role}
        collectives, writers = [], []
        for node, (role, is_collective, is_mutation, *_) in zip(self.nodes, self.table.kinds, strict=True):
            by_role[role].append(node)
            if is_collective:
                collectives.append(node)
            if is_mutation and role is not Role.RESHARD:
                writers.append(node)
        return by_role, collectives, writers

    @cached_property
    def by_role(self) -> dict[Role, list[fx.Node]]:
        """Nodes of each role, in order."""
        return self._sorted[0]

    @cached_property
    def collectives(self) -> list[fx.Node]:
        """Nodes that start a collective, of this dialect or of torch's, in order."""
        return self._sorted[1]

    @cached_property
    def writers(self) -> list[fx.Node]:
        """Nodes that write an argument in place, in order; frees are none."""
        return self._sorted[2]

    @cached_property
    def dependents(self) -> bytearray:
        """By position: whether the value of a node depends on a tangent."""
        return tangent_dependents(self.graph, self.table)

    def is_gradient(self, node: fx.Node) -> bool:
        """Whether the value of `node` depends on a tangent."""
        index = self.position.get(node)
        return index is not None and bool(self.dependents[index])

    @cached_property
    def boundary(self) -> Boundary:
        """Where forward ends and backward begins; behind all nodes where there is no backward."""
        found = boundary(self.graph, self.aliases, self.dependents)
        return Boundary(len(self.nodes), len(self.nodes)) if found is None else found

    @property
    def backward_start(self) -> int:
        """Position of the first node that can only belong to backward."""
        return self.boundary.latest

    def is_backward(self, node: fx.Node) -> bool:
        """Whether `node` stands in the backward half."""
        return self.position[node] >= self.backward_start

    def direction(self, node: fx.Node) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.is_backward(node) else "forward"

    # -- memory and parameters -------------------------------------------------------------------------------------
    @cached_property
    def aliases(self) -> Aliases:
        """Who shares memory with whom."""
        return Aliases(self.table)

    @cached_property
    def gathers(self) -> Gathers:
        """Every gathering of a parameter."""
        return Gathers(self.manifest, self.aliases)

    @cached_property
    def placeholders(self) -> dict[fx.Node, ParameterSpec]:
        """The placeholders that are parameters."""
        specs = {p.placeholder: p for p in self.manifest.parameters}
        found = {}
        for node in self.by_role[Role.PLACEHOLDER]:
            if node.target in specs:
                found[node] = specs[node.target]
        return found

    @cached_property
    def parameters_in(self) -> list[dict[str, ParameterSpec] | None]:
        """By position: the parameters from which, with constants, a node is computed; None where from more."""
        found: list[dict[str, ParameterSpec] | None] = [None] * len(self.table)
        for node, spec in self.placeholders.items():
            found[self.position[node]] = self._alone[spec.name]
        for index, inputs in enumerate(self.table.inputs):
            for source in inputs:
                if found[source] is None:
                    break
            else:
                if inputs:
                    found[index] = self._parameters_of_pure(index, found)
                elif self.table.kinds[index].role is not Role.PLACEHOLDER:
                    found[index] = _NO_PARAMETERS
        return found

    def parameters_of(self, node: fx.Node) -> dict[str, ParameterSpec] | None:
        """The parameters from which, with constants, `node` is computed; None where from more."""
        index = self.position.get(node)
        return None if index is None else self.parameters_in[index]

    @cached_property
    def _alone(self) -> dict[str, dict[str, ParameterSpec]]:
        return {spec.name: {spec.name: spec} for spec in self.manifest.parameters}

    def _parameters_of_pure(
        self, index: int, found: Sequence[dict[str, ParameterSpec] | None]
    ) -> dict[str, ParameterSpec]:
        gathers = self.gathers.holders.get(self.nodes[index])
        if gathers is not None:
            if len(gathers) == 1 and gathers[0].parameter is not None:
                return self._alone[gathers[0].parameter.name]
            return {g.parameter.name: g.parameter for g in gathers if g.parameter is not None}
        parts = [found[source] or _NO_PARAMETERS for source in self.table.inputs[index]]
        return parts[0] if len(parts) == 1 else {name: spec for part in parts for name, spec in part.items()}

    @cached_property
    def regions(self) -> Regions:
        """Every run of every MoE region."""
        return Regions(self)

    @cached_property
    def experts(self) -> frozenset[str]:
        """Names of the parameters of all regions."""
        return frozenset(name for region in self.manifest.regions for name in region.parameters)

    # -- output ----------------------------------------------------------------------------------------------------
    @cached_property
    def output(self) -> fx.Node:
        """The output node."""
        return self.graph.output

    def output_group(self, index: int) -> tuple[Any, ...]:
        """Outputs (0), parameter gradients (1) or input gradients (2); empty where the output lacks them."""
        groups = self.output.args[0] if self.output.args else ()
        if not isinstance(groups, (list, tuple)) or index >= len(groups):
            return ()
        group = groups[index]
        return tuple(group) if isinstance(group, (list, tuple)) else ()

    @cached_property
    def gradients(self) -> dict[str, Any]:
        """What is returned as gradient of each trainable parameter, as far as the output goes."""
        return {p.name: g for p, g in zip(self.manifest.trainable, self.output_group(1), strict=False)}

    @cached_property
    def paths(self) -> list[tuple[ParameterSpec, GradientPath]]:
        """The way of each trainable parameter's gradient."""
        specs = self.manifest.names
        found = [(specs[name], value) for name, value in self.gradients.items()]
        return [(s, gradient_path(v, bool(self.sharded and due_dims(self.manifest, s)))) for s, v in found]
