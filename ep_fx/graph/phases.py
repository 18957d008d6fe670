"""Where backward begins, derived from data alone: labels in NodeInfo are not read.

    forward    up to the last node that an output or a buffer update needs
    either     what follows it: freed parameters, sizes
    backward   from the first node behind it that reads a gradient, or gathers parameters anew

A graph without tangents is forward only. Two walks, O(nodes).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import fx

from ep_fx.graph.aliases import Aliases
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import Role
from ep_fx.graph.table import NodeTable

_OPENS_BACKWARD = frozenset({Role.PAD_SHARD, Role.UNSHARD})


class Boundary(NamedTuple):
    """Where forward ends and backward begins.

    Args:
        earliest: position behind the last node that forward needs.
        latest: position of the first node that can only belong to backward.
    """

    earliest: int
    latest: int


def tangent_dependents(graph: ParallelGraph, table: NodeTable) -> bytearray:
    """By position: whether the value of a node depends on a tangent; the tangents do themselves."""
    tangents = set(graph.manifest.tangents)
    found = bytearray(len(table))
    for index, (kind, inputs) in enumerate(zip(table.kinds, table.inputs, strict=True)):
        if kind.role is Role.PLACEHOLDER:
            found[index] = table.nodes[index].target in tangents
            continue
        for source in inputs:
            if found[source]:
                found[index] = kind.role is not Role.OUTPUT
                break
    return found


def boundary(
    graph: ParallelGraph, aliases: Aliases | None = None, dependents: bytearray | None = None
) -> Boundary | None:
    """Where `graph` turns from forward to backward, None where it has no backward half."""
    if not graph.manifest.tangents:
        return None
    aliases = aliases or Aliases(graph)
    table = aliases.table
    dependents = tangent_dependents(graph, table) if dependents is None else dependents
    forward = _needed_by_forward(graph, aliases, dependents)
    first = len(table)
    while first and not forward[first - 1] and table.kinds[first - 1].role is not Role.PLACEHOLDER:
        first -= 1
    for position in range(first, len(table)):
        role = table.kinds[position].role
        if role is Role.OUTPUT or dependents[position] or role in _OPENS_BACKWARD:
            return Boundary(first, position)
    return Boundary(first, len(table))


def _needed_by_forward(graph: ParallelGraph, aliases: Aliases, dependents: bytearray) -> bytearray:
    """By position: what outputs and buffer updates are computed from; nothing that depends on a gradient."""
    table = aliases.table
    buffers = {b.placeholder for b in graph.manifest.buffers}
    outputs = cast(tuple[Any, ...], graph.output.args[0])[0]
    needed = bytearray(len(table))
    for node in _flat(outputs):
        if node in table.position:
            needed[table.position[node]] = True
    for index in range(len(table) - 1, -1, -1):
        if dependents[index]:
            needed[index] = False
            continue
        kind = table.kinds[index]
        if not needed[index] and kind.is_mutation and kind.role is not Role.RESHARD:
            needed[index] = _updates(table.nodes[index], buffers, aliases)
        if needed[index]:
            for source in table.inputs[index]:
                needed[source] = True
    return needed


def _updates(node: fx.Node, buffers: set[str], aliases: Aliases) -> bool:
    written = node.args[0] if node.args else None
    return isinstance(written, fx.Node) and any(memory[0].target in buffers for memory in aliases.memory(written))


def _flat(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
