"""The order that no data edge shows: which node must stay before which because of memory.

    unshard_wait(w)  ->  reshard(w)     memory is freed after it arrived,
    mm(x, w)         ->  reshard(w)     and after every reader, through any alias
    read(b), add_(b) ->  add_(b), read(b)   accesses of written memory keep the order they have

Derived from targets, arguments and the Manifest whenever it is asked for: a node stored in ``meta`` is not remapped
by a copy of the graph and outlives its erasure. The order of a rewritten buffer's accesses is the list's own, so ask
before nodes move and compare after. Two walks, O(nodes).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from ep_fx.graph.aliases import Aliases, Memory
from ep_fx.graph.gathers import Gathers
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import Role, is_mutation


class EffectEdge(NamedTuple):
    """`before` must stand before `after`, because of `reason`."""

    before: fx.Node
    after: fx.Node
    reason: str


def effect_edges(
    graph: ParallelGraph, aliases: Aliases | None = None, gathers: Gathers | None = None
) -> list[EffectEdge]:
    """All effect edges of `graph`; hand in `aliases` and `gathers` where they are known already."""
    aliases = aliases or Aliases(graph)
    gathers = gathers or Gathers(graph.manifest, aliases)
    return [*_freeing(gathers), *_writing(aliases)]


def _freeing(gathers: Gathers) -> Iterator[EffectEdge]:
    for gather in gathers.all:
        arrives, is_read = (f"{gather.name} {what} before it is freed" for what in ("arrives", "is read"))
        for reshard in gather.reshards:
            for wait in gather.waits:
                yield EffectEdge(wait, reshard, arrives)
            for reader in gather.readers:
                yield EffectEdge(reader, reshard, is_read)
        for reshard in gather.block_reshards:
            for reader in gather.block_readers:
                yield EffectEdge(reader, reshard, f"the blocks of {gather.name} are read before they are freed")


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that `node` writes in place."""
    if not is_mutation(node):
        return
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node))


def _writing(aliases: Aliases) -> Iterator[EffectEdge]:
    nodes = aliases.table.nodes
    writing = (i for i, k in enumerate(aliases.table.kinds) if k.is_mutation and k.role is not Role.RESHARD)
    writers = {nodes[index]: set(written_by(nodes[index])) for index in writing}
    written = {m for values in writers.values() for value in values for m in aliases.memory(value)}
    if not written:
        return
    holders = {m[0] for m in written} | {n for n in aliases.shared if not written.isdisjoint(aliases.memory(n))}
    last_write: dict[Memory, fx.Node] = {}
    reads: dict[Memory, list[fx.Node]] = {}
    for node in nodes:
        if holders.isdisjoint(node._input_nodes):
            continue
        touched = {m: None for value in node._input_nodes for m in aliases.memory(value) if m in written}
        writes = {m for value in writers.get(node, ()) for m in aliases.memory(value)}
        for memory in touched:
            if memory in last_write:
                yield EffectEdge(last_write[memory], node, f"%{node.name} sees what %{last_write[memory].name} wrote")
            if memory not in writes:
                reads.setdefault(memory, []).append(node)
                continue
            for reader in reads.pop(memory, ()):
                yield EffectEdge(reader, node, f"%{reader.name} reads before %{node.name} writes")
            last_write[memory] = node
