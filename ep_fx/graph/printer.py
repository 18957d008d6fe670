"""The graph as stable, readable text: byte for byte the same in every process that builds the same graph.

    # dispatch model.layers.0.mlp.experts
    %all_to_all_single: i64[4] = c10d.all_to_all_single(%permute.tokens_per_expert, [2, 2], [2, 2], "ep")  # model..

Process groups are shown by the mesh dimensions they span, values by stable names, symbols renumbered. A comment line
opens each gather, free, dispatch, combine, reduction and each block of compute. `parse_graph` reads the text back;
comments say nothing but where a node comes from. One walk, no change to the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from ep_fx.graph.constants import constant_text
from ep_fx.graph.groups import GroupTexts, group_positions
from ep_fx.graph.header import (
    computation_lines,
    fact_lines,
    name_text,
    parameter_facts,
    placeholder_fact,
    region_lines,
    usual_placeholder,
)
from ep_fx.graph.info import Phase, info_of
from ep_fx.graph.literals import Writer
from ep_fx.graph.names import value_names
from ep_fx.graph.operators import target_text
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import GROUP_ARGUMENTS, Action, Places
from ep_fx.graph.roles import Role, role_of
from ep_fx.graph.texts import block_of, plural, source_text
from ep_fx.graph.values import SymbolNames, bytes_text


def print_graph(graph: ParallelGraph, *, phase: Phase | None = None, types: bool = True) -> str:
    """The text of `graph`.

    Args:
        phase: only this half's nodes; names and symbols stay those of the whole graph.
        types: whether to show the type of each value.
    """
    text = GraphText(graph, types)
    lines = text.header()
    sections = text.sections()
    for index, (half, nodes) in enumerate(sections):
        if phase in (None, half):
            lines += ["", f"{half.value}:", *text.body(nodes)]
            if all(later is not half for later, _ in sections[index + 1 :]):
                lines += text.returned(half)
    if phase is None:
        lines += computation_lines(graph.manifest)
    return "\n".join(lines) + "\n"


class GraphText:
    """Pieces of the text of one graph, node by node.

    Args:
        graph: the graph; it must not change while this object is in use.
        types: whether lines show the type of their value.
    """

    def __init__(self, graph: ParallelGraph, types: bool = True) -> None:
        self.graph, self.types = graph, types
        self.places = Places(graph)
        self.names = value_names(graph, self.places)
        self.symbols = SymbolNames(graph)
        if self.symbols.device is None:
            self.symbols.device = next((value.device for value in graph.constants.values()), None)
        self.groups = GroupTexts(graph.manifest.mesh)
        self._writer = Writer(self.names.__getitem__, self.symbols.size)
        self._regions = {region.name for region in graph.manifest.regions}

    # -- header ----------------------------------------------------------------------------------------------------
    def header(self) -> list[str]:
        """Number of nodes, facts, units, regions, and the placeholders: one line each."""
        manifest, nodes = self.graph.manifest, list(self.graph)
        backward = sum(self._phase(node) is Phase.BACKWARD for node in nodes)
        where = f" on {self.symbols.device}" if self.types and self.symbols.device else ""
        lines = [
            f"graph of {plural(len(nodes), 'node')}{where}: {len(nodes) - backward} forward, {backward} backward; "
            f"returns {plural(manifest.num_outputs, 'output')}"
        ]
        if self.types and self.symbols.hints:
            sizes = ", ".join(f"{name}={hint}" for name, hint in self.symbols.hints.items())
            lines.append(f"sizes {sizes} in the trace")
        lines += fact_lines(manifest, self.graph.provides)
        for unit, members in manifest.units.items():
            size = bytes_text(sum(p.full_bytes for p in members))
            lines.append(f"unit {name_text(unit)}: {plural(len(members), 'parameter')}, {size} gathered")
        lines += region_lines(manifest)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        return [*lines, "", "placeholders:", *self._placeholders(placeholders)] if placeholders else lines

    def _phase(self, node: fx.Node) -> Phase:
        """The half in which `node` is counted, whatever label a placeholder or the output has."""
        if node.op in ("placeholder", "output"):
            late = node.target in self.graph.manifest.tangents or (node.op == "output" and self.graph.manifest.tangents)
            return Phase.BACKWARD if late else Phase.FORWARD
        return info_of(node).phase

    def _placeholders(self, nodes: Sequence[fx.Node]) -> list[str]:
        manifest = self.graph.manifest
        buffers, zero = {b.placeholder: b for b in manifest.buffers}, set(manifest.zero_gradients)
        rows: list[tuple[str, str, str]] = []
        for node in nodes:
            target, usual = str(node.target), self.names[node]
            what, fact = "input", "gradient returned" if target in manifest.input_grads else ""
            if spec := self.places.parameters.get(node):
                what, usual = f"parameter {self.value(spec.name)}", usual_placeholder("parameter", spec.name)
                fact = parameter_facts(spec, spec.name in zero)
            elif buffer := buffers.get(target):
                what, usual = f"buffer {self.value(buffer.name)}", usual_placeholder("buffer", buffer.name)
                fact = "updated in forward" if buffer.mutated else ""
            elif target in manifest.tangents:
                index = manifest.tangents.index(target)
                what = f"tangent of output {manifest.differentiable[index]}"
                usual = usual_placeholder("tangent", str(index))
            rows.append((self._left(node), what, placeholder_fact(fact, target, usual)))
        left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
        return [f"  {a:<{left}} = {b:<{middle}}  {c}".rstrip() for a, b, c in rows]

    # -- body ------------------------------------------------------------------------------------------------------
    def sections(self) -> list[tuple[Phase, list[fx.Node]]]:
        """The nodes, placeholders apart, cut where their phase changes: in a valid graph forward, then backward."""
        found: list[tuple[Phase, list[fx.Node]]] = []
        for node in self.graph:
            if node.op in ("placeholder", "output"):
                continue
            phase = info_of(node).phase
            if not found or found[-1][0] is not phase:
                found.append((phase, []))
            found[-1][1].append(node)
        phases = {phase for phase, _ in found}
        if Phase.FORWARD not in phases:
            found.insert(0, (Phase.FORWARD, []))
        if Phase.BACKWARD not in phases and self.graph.manifest.tangents:
            found.append((Phase.BACKWARD, []))
        return found

    def body(self, nodes: Sequence[fx.Node]) -> list[str]:
        """Lines of a section, with a comment where what the nodes are doing changes."""
        lines: list[str] = []
        title = None
        for node in nodes:
            heading = self.title(node)
            if heading not in (None, title):
                title = heading
                lines += ["", f"  # {heading}"] if lines else [f"  # {heading}"]
            lines.append("  " + self.line(node))
        return lines

    def title(self, node: fx.Node) -> str | None:
        """What the group of lines that `node` stands in is doing; None for a node that belongs to any group."""
        place = self.places[node]
        if place.action is Action.REDUCE:
            return f"reduce gradients of {place.subject}"
        if place.action is not Action.COMPUTE:
            return f"{place.action.value} {place.subject}"
        if place.subject is None or isinstance(node.meta.get("val"), torch.SymInt):
            return None
        if place.subject in self._regions:
            return place.subject
        return block_of(place.subject) or "model"

    def line(self, node: fx.Node, note: bool = True) -> str:
        """``%name: type = op(arguments)  # module (source)``; without the comment where `note` is False."""
        info = info_of(node)
        spec = self.places.parameters.get(node) or self.places.gradients.get(node)
        where = spec.name if spec else "model" if info.fqn == "" else info.fqn
        comment = " ".join(x for x in (where, f"({source_text(info.source)})" if info.source else None) if x)
        call = self.call(node)
        has_result = role_of(node) is not Role.RESHARD
        text = f"{self._left(node)} = {call}" if has_result else call
        return f"{text}  # {comment}" if note and comment else text

    def call(self, node: fx.Node) -> str:
        """The right-hand side."""
        if role_of(node) is Role.GETITEM:
            return f"{self.value(node.args[0])}[{self.value(node.args[1])}]"
        if node.op == "get_attr":
            return constant_text(str(node.target), self.graph.constants.get(str(node.target)))
        groups = group_positions(node.target)
        parts = [self.group(a) if i in groups else self.value(a) for i, a in enumerate(node.args)]
        for name, argument in node.kwargs.items():
            parts.append(f"{name}={self.group(argument) if name in GROUP_ARGUMENTS else self.value(argument)}")
        target = target_text(node.target) if node.op == "call_function" else f"<{node.op}>.{node.target}"
        return f"{target}({', '.join(parts)})"

    def returned(self, phase: Phase) -> list[str]:
        """Lines of what one half returns: outputs in forward, gradients in backward."""
        outputs, gradients, inputs = cast(tuple[tuple[Any, ...], ...], self.graph.output.args[0])
        if phase is Phase.FORWARD:
            return ["", f"  return {self.value(list(outputs))}"]
        manifest = self.graph.manifest
        places = {node.target: self.names[node] for node in self.graph if node.op == "placeholder"}
        parameters = [(f"%{places[p.placeholder]}", f"  # {p.name}") for p in manifest.trainable]
        wanted = [(f"%{places.get(name, name)}", "") for name in manifest.input_grads]
        lines = [""] if gradients or inputs else []
        for kind, whose, values in (("parameter", parameters, gradients), ("input", wanted, inputs)):
            surplus = [(f"no {kind}", "")] * (len(values) - len(whose))
            for (name, note), value in zip([*whose, *surplus], values, strict=False):
                lines.append(f"  return gradient of {name}: {self.value(value)}{note}")
        return lines

    def _left(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        if node.op == "get_attr":
            value = self.graph.constants.get(str(node.target), value)
        type_text = self.symbols.type(value, exact=True) if self.types else ""
        return f"%{self.names[node]}: {type_text}" if type_text else f"%{self.names[node]}"

    # -- arguments -------------------------------------------------------------------------------------------------
    def group(self, name: Any) -> str:
        """A process group, as the mesh dimensions it spans."""
        return self.value(self.groups.text(name) if isinstance(name, str) else name)

    def value(self, value: Any) -> str:
        """One argument; never an address or anything else that differs between runs."""
        return self._writer.value(value)
