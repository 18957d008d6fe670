"""What the ranks of a mesh must agree on, as lines: equal on all ranks, for every hash seed and all data.

    param  lm_head.weight: f32 [256, 64], dim 0 cut 4 x 64 over fsdp,ep; unit root
    forward ep_fx::unshard over fsdp,ep: f32[64, 64] f32[16]

Groups are written as mesh dimensions, since the names of process groups differ between ranks; sizes are formulas in
the graph's symbols, renumbered by first appearance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from ep_fx.graph.info import info_of
from ep_fx.graph.manifest import ParameterSpec
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import group_argument
from ep_fx.graph.roles import is_collective, target_name
from ep_fx.graph.texts import group_text, parameter_text
from ep_fx.graph.values import SymbolNames, dtype_text


def collective_lines(graph: ParallelGraph) -> list[str]:
    """One line for each collective, in order of execution."""
    symbols = SymbolNames(graph)
    return [_line(graph, node, symbols) for node in graph if is_collective(node)]


def _line(graph: ParallelGraph, node: fx.Node, symbols: SymbolNames) -> str:
    group = group_text(group_argument(node) or "?", graph.manifest.mesh)
    values = " ".join(symbols.type(n.meta.get("val")) for n in _sent(node))
    return f"{info_of(node).phase.value} {target_name(node)} over {group}: {values}"


def _sent(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a collective is given."""
    value: Any = node.args[0]
    yield from (value,) if isinstance(value, fx.Node) else value


def parameter_lines(parameters: Iterable[ParameterSpec]) -> list[str]:
    """One line for each parameter, in order: name, dtype, layout, unit, whether it is frozen."""
    return [f"param  {p.name}: {dtype_text(p.dtype)} {parameter_text(p)}" for p in parameters]
