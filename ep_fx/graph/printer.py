"""The graph as stable, readable text: byte for byte the same in every process that builds the same graph.

    # dispatch model.layers.0.mlp.experts
    %all_to_all_single: i64[4] = c10d.all_to_all_single(%permute.tokens_per_expert, [2, 2], [2, 2], "ep")  # model..

Process groups are shown by the mesh dimensions they span, values by stable names, symbols renumbered. A comment line
opens each gather, free, dispatch, combine, reduction and each block of compute. One walk, no change to the graph.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from ep_fx.graph.info import Phase, info_of
from ep_fx.graph.names import value_names
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import GROUP_ARGUMENTS, Action, Places
from ep_fx.graph.roles import Role, role_of
from ep_fx.graph.texts import block_of, group_text, mesh_text, parameter_text, plural, source_text, target_text
from ep_fx.graph.values import SymbolNames, bytes_text, dtype_text

_LONG_RUN = 4
"""So many consecutive names of one form are shown as ``%p3..%p9``."""
_WHOLE = 2**63 - 1
"""The end of a slice that has none."""
_PLAIN = (bool, int, float, complex, torch.device, torch.memory_format, torch.layout)
_FORM = re.compile(r"(%p)(\d+)(\.\w+)?$")


def print_graph(graph: ParallelGraph, *, phase: Phase | None = None, types: bool = True) -> str:
    """The text of `graph`.

    Args:
        phase: only this half's nodes; names and symbols stay those of the whole graph.
        types: whether to show the type of each value.
    """
    text = GraphText(graph, types)
    lines = text.header()
    for title, half in (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD)):
        if phase in (None, half):
            lines += ["", f"{title}:", *text.body(half)]
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
        self._regions = {region.name for region in graph.manifest.regions}

    # -- header ----------------------------------------------------------------------------------------------------
    def header(self) -> list[str]:
        """Mesh, passes, units, regions, and the placeholders: one line each."""
        manifest, nodes = self.graph.manifest, list(self.graph)
        backward = sum(info_of(n).phase is Phase.BACKWARD for n in nodes)
        lines = [
            f"graph of {len(nodes)} nodes: {len(nodes) - backward} forward, {backward} backward",
            f"mesh {mesh_text(manifest.mesh)}",
            f"passes {', '.join(self.graph.provides) or 'none'}",
        ]
        for unit, members in manifest.units.items():
            size = bytes_text(sum(p.full_bytes for p in members))
            lines.append(f"unit {unit}: {plural(len(members), 'parameter')}, {size} gathered")
        for region in manifest.regions:
            lines.append(f"region {region.name}: {region.num_experts} experts, unit {region.unit}")
        placeholders = [node for node in nodes if node.op == "placeholder"]
        if placeholders:
            lines += ["", "placeholders:", *self._placeholders(placeholders)]
        return lines

    def _placeholders(self, nodes: Sequence[fx.Node]) -> list[str]:
        manifest = self.graph.manifest
        buffers = {b.placeholder: b for b in manifest.buffers}
        rows: list[tuple[str, str, str]] = []
        for node in nodes:
            what, note = "input", ""
            if spec := self.places.parameters.get(node):
                what, note = f'parameter "{spec.name}"', parameter_text(spec)
            elif buffer := buffers.get(str(node.target)):
                what, note = f'buffer "{buffer.name}"', "updated in forward" if buffer.mutated else ""
            elif node.target in manifest.tangents:
                output = manifest.differentiable[manifest.tangents.index(str(node.target))]
                what = f"tangent of output {output}"
            rows.append((self._left(node), what, note))
        left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
        return [f"  {a:<{left}} = {b:<{middle}}  {'# ' + c if c else ''}".rstrip() for a, b, c in rows]

    # -- body ------------------------------------------------------------------------------------------------------
    def body(self, phase: Phase) -> list[str]:
        """Lines of one half, with a comment where what the nodes are doing changes."""
        lines: list[str] = []
        title = None
        for node in self.graph:
            if node.op == "placeholder" or (info_of(node).phase is not phase and node.op != "output"):
                continue
            if node.op == "output":
                lines += ["", *self.output(node, phase)]
                continue
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
        where = spec.name if spec else info.fqn
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
            return "constant()"
        schema = getattr(node.target, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        parts = []
        for position, argument in enumerate(node.args):
            is_group = position < len(arguments) and arguments[position].name in GROUP_ARGUMENTS
            parts.append(self.group(argument) if is_group else self.value(argument))
        for name, argument in node.kwargs.items():
            parts.append(f"{name}={self.group(argument) if name in GROUP_ARGUMENTS else self.value(argument)}")
        return f"{target_text(node)}({', '.join(parts)})"

    def output(self, node: fx.Node, phase: Phase) -> list[str]:
        """What one half returns: outputs in forward, gradients in backward."""
        outputs, gradients, inputs = cast(tuple[tuple[Any, ...], ...], node.args[0])
        if phase is Phase.FORWARD:
            return [f"  return {self.value(list(outputs))}"]
        lines = [
            f"  return gradient of %p{self.graph.manifest.parameters.index(spec)}: {self.value(value)}  # {spec.name}"
            for spec, value in zip(self.graph.manifest.trainable, gradients, strict=True)
        ]
        named = zip(self.graph.manifest.input_grads, inputs, strict=False)
        return lines + [f"  return gradient of {name}: {self.value(value)}" for name, value in named]

    def _left(self, node: fx.Node) -> str:
        type_text = self.symbols.type(node.meta.get("val")) if self.types else ""
        return f"%{self.names[node]}: {type_text}" if type_text else f"%{self.names[node]}"

    # -- arguments -------------------------------------------------------------------------------------------------
    def group(self, name: Any) -> str:
        """A process group, as the mesh dimensions it spans."""
        return f'"{group_text(str(name), self.graph.manifest.mesh)}"'

    def value(self, value: Any) -> str:
        """One argument; never an address or anything else that differs between runs."""
        if isinstance(value, fx.Node):
            return f"%{self.names[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(_shorten([self.value(item) for item in value]))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {self.value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return ":".join("" if x is None else self.value(x) for x in (value.start, value.stop, value.step))
        if isinstance(value, torch.SymInt):
            return self.symbols.size(value)
        if isinstance(value, torch.dtype):
            return dtype_text(value)
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if isinstance(value, int) and value == _WHOLE:
            return "max"
        if value is None or isinstance(value, _PLAIN):
            return str(value)
        return f"<{type(value).__name__}>"


def _shorten(names: list[str]) -> list[str]:
    """Runs of consecutive parameters of one form as ``first..last``."""
    result: list[str] = []
    start = 0
    for i in range(1, len(names) + 1):
        if i < len(names) and _follows(names[i - 1], names[i]):
            continue
        run = names[start:i]
        result += [f"{run[0]}..{run[-1]}"] if len(run) >= _LONG_RUN else run
        start = i
    return result


def _follows(left: str, right: str) -> bool:
    a, b = _FORM.match(left), _FORM.match(right)
    return bool(a and b and int(b[2]) == int(a[2]) + 1 and a[3] == b[3])
