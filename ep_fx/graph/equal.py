"""Whether two graphs are the same program with the same facts, whatever their nodes and process groups are called.

Compared: nodes in order, targets, arguments, phases, values' types, constants, the Manifest, and which passes ran. Not
compared: names, module paths and source lines (they are for readers), and how symbols of sizes are numbered.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx

from ep_fx.graph.groups import GroupTexts, group_positions
from ep_fx.graph.info import info_of
from ep_fx.graph.manifest import Manifest, MeshSpec
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import GROUP_ARGUMENTS
from ep_fx.graph.values import SymbolNames


def graph_equal(a: ParallelGraph, b: ParallelGraph) -> bool:
    """Whether `a` and `b` are equal; `graph_difference` says where they are not."""
    return graph_difference(a, b) is None


def graph_difference(a: ParallelGraph, b: ParallelGraph) -> str | None:
    """The first difference between two graphs, in words; None where they are equal."""
    facts = _facts_difference(a, b)
    if facts is not None:
        return facts
    left, right = list(a), list(b)
    pairs = dict(zip(left, right, strict=False))
    comparison = _Comparison(a, b, pairs)
    for index, (one, other) in enumerate(pairs.items()):
        what = comparison.of_nodes(one, other)
        if what is not None:
            return f"node {index}, %{one.name} and %{other.name}: {what}"
    if len(left) != len(right):
        return f"{len(left)} nodes and {len(right)}"
    return None


def _facts_difference(a: ParallelGraph, b: ParallelGraph) -> str | None:
    if a.provides != b.provides:
        return f"passes {a.provides} and {b.provides}"
    one, other = _nameless(a.manifest), _nameless(b.manifest)
    for field in fields(Manifest):
        if field.compare and getattr(one, field.name) != getattr(other, field.name):
            return f"Manifest.{field.name}: {getattr(one, field.name)} and {getattr(other, field.name)}"
    same = dict(one.computation) == dict(other.computation)
    return None if same else "Manifest.computation: what is computed differs"


def _nameless(manifest: Manifest) -> Manifest:
    """`manifest` with placeholders called by their number and groups by their dimensions."""
    texts = GroupTexts(manifest.mesh)
    order = [*(p.placeholder for p in manifest.parameters), *(b.placeholder for b in manifest.buffers)]
    order += [*manifest.inputs, *manifest.tangents]
    numbers = {name: str(index) for index, name in enumerate(order)}

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(numbers.get(name, name) for name in names)

    mesh = manifest.mesh
    return replace(
        manifest,
        mesh=MeshSpec(
            dict(mesh.sizes),
            {dims: texts.text(name) for dims, name in mesh.groups.items()},
            texts.text(mesh.exchange) if mesh.exchange else "",
        ),
        parameters=tuple(replace(p, placeholder=numbers[p.placeholder]) for p in manifest.parameters),
        buffers=tuple(replace(b, placeholder=numbers[b.placeholder]) for b in manifest.buffers),
        inputs=renamed(manifest.inputs),
        tangents=renamed(manifest.tangents),
        input_grads=renamed(manifest.input_grads),
    )


class _Comparison:
    """Compares nodes, given which node of one graph stands for which of the other."""

    def __init__(self, a: ParallelGraph, b: ParallelGraph, pairs: dict[fx.Node, fx.Node]) -> None:
        self._graphs, self._pairs = (a, b), pairs
        self._symbols = SymbolNames(a), SymbolNames(b)
        self._groups = GroupTexts(a.manifest.mesh), GroupTexts(b.manifest.mesh)

    def of_nodes(self, a: fx.Node, b: fx.Node) -> str | None:
        """What differs between two nodes."""
        if a.op != b.op:
            return f"{a.op} and {b.op}"
        if a.op == "placeholder":
            return self._of_types(a, b)
        if a.op == "get_attr":
            return self._of_constants(a, b)
        if a.op != "output":
            if a.target is not b.target:
                return f"{a.target} and {b.target}"
            if info_of(a).phase is not info_of(b).phase:
                return f"{info_of(a).phase.value} and {info_of(b).phase.value}"
        if not self._same((self._args(a, 0), self._kwargs(a, 0)), (self._args(b, 1), self._kwargs(b, 1))):
            return f"arguments {a.args} {a.kwargs} and {b.args} {b.kwargs}"
        return self._of_types(a, b)

    def _of_types(self, a: fx.Node, b: fx.Node) -> str | None:
        types = [s.type(n.meta.get("val"), exact=True) for s, n in zip(self._symbols, (a, b), strict=True)]
        return None if types[0] == types[1] else f"{types[0] or 'no type'} and {types[1] or 'no type'}"

    def _of_constants(self, a: fx.Node, b: fx.Node) -> str | None:
        one, other = (g.constants.get(str(n.target)) for g, n in zip(self._graphs, (a, b), strict=True))
        if one is None or other is None:
            return None if one is other else "a constant is missing"
        same = one.dtype == other.dtype and one.shape == other.shape
        known = one.device.type != "meta" and other.device.type != "meta"
        if same and (not known or torch.equal(one.cpu().nan_to_num(), other.cpu().nan_to_num())):
            return None
        return f"constants {one} and {other}"

    def _args(self, node: fx.Node, side: int) -> list[Any]:
        args: list[Any] = list(node.args)
        for position in group_positions(node.target) if node.op == "call_function" else ():
            if position < len(args) and isinstance(args[position], str):
                args[position] = self._groups[side].text(args[position])
        return args

    def _kwargs(self, node: fx.Node, side: int) -> dict[str, Any]:
        texts = self._groups[side]
        return {k: texts.text(v) if k in GROUP_ARGUMENTS and isinstance(v, str) else v for k, v in node.kwargs.items()}

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return self._pairs.get(a) is b
        if isinstance(a, (list, tuple)):
            kind = list if isinstance(a, list) else tuple
            return isinstance(b, kind) and len(a) == len(b) and all(map(self._same, a, b))
        if isinstance(a, dict):
            return isinstance(b, dict) and a.keys() == b.keys() and all(self._same(v, b[k]) for k, v in a.items())
        if isinstance(a, slice):
            return isinstance(b, slice) and self._same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
        if isinstance(a, float) and isinstance(b, float):
            return a == b or (math.isnan(a) and math.isnan(b))
        if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
            return self._symbols[0].size(a) == self._symbols[1].size(b)
        return type(a) is type(b) and bool(a == b)
