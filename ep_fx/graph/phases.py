"""Where backward begins, derived from data alone: labels in NodeInfo are not read.

    forward    up to the last node that an output or a buffer update needs
    either     what follows it: freed parameters, sizes
    backward   from the first node behind it that reads a gradient, or gathers parameters anew

A graph without tangents is forward only. Two walks, O(nodes).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import fx

from ep_fx.graph.aliases import Aliases
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import Role, is_mutation, role_of

_OPENS_BACKWARD = frozenset({Role.PAD_SHARD, Role.UNSHARD})


class Boundary(NamedTuple):
    """Where forward ends and backward begins.

    Args:
        earliest: position behind the last node that forward needs.
        latest: position of the first node that can only belong to backward.
    """

    earliest: int
    latest: int


def tangent_dependents(graph: ParallelGraph) -> set[fx.Node]:
    """The nodes whose value depends on a tangent, the tangents themselves included."""
    tangents = set(graph.manifest.tangents)
    found: set[fx.Node] = set()
    for node in graph:
        if node.op == "placeholder":
            if node.target in tangents:
                found.add(node)
        elif node.op != "output" and not found.isdisjoint(node._input_nodes):
            found.add(node)
    return found


def boundary(
    graph: ParallelGraph, aliases: Aliases | None = None, dependents: set[fx.Node] | None = None
) -> Boundary | None:
    """Where `graph` turns from forward to backward, None where it has no backward half."""
    if not graph.manifest.tangents:
        return None
    nodes = list(graph)
    dependents = tangent_dependents(graph) if dependents is None else dependents
    forward = _needed_by_forward(graph, nodes, aliases or Aliases(nodes), dependents)
    first = len(nodes)
    while first and nodes[first - 1] not in forward and nodes[first - 1].op != "placeholder":
        first -= 1
    for position in range(first, len(nodes)):
        node = nodes[position]
        if node.op == "output" or node in dependents or role_of(node) in _OPENS_BACKWARD:
            return Boundary(first, position)
    return Boundary(first, len(nodes))


def _needed_by_forward(
    graph: ParallelGraph, nodes: Sequence[fx.Node], aliases: Aliases, dependents: set[fx.Node]
) -> set[fx.Node]:
    """What outputs and buffer updates are computed from; nothing that depends on a gradient."""
    buffers = {b.placeholder for b in graph.manifest.buffers}
    outputs = cast(tuple[Any, ...], graph.output.args[0])[0]
    needed = {n for n in _flat(outputs) if n not in dependents}
    for node in reversed(nodes):
        if node in dependents:
            continue
        if node not in needed and is_mutation(node) and role_of(node) is not Role.RESHARD:
            written = node.args[0] if node.args else None
            if isinstance(written, fx.Node) and any(m[0].target in buffers for m in aliases.memory(written)):
                needed.add(node)
        if node in needed:
            for source in node._input_nodes:
                if source not in dependents:
                    needed.add(source)
    return needed


def _flat(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
