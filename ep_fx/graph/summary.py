"""Table of the collectives of a graph: what moves, over which mesh dimensions, how often, how many bytes.

    direction  collective       over      count  bytes a rank
    forward    unshard          fsdp,ep       4  1.2 MiB
    forward    dispatch         ep            2  512*R

Bytes are the whole of a gather, and what one rank sends in any other collective. ``R`` stands for a number of rows
known only at run time; each region has its own.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx

from ep_fx.graph.info import Phase, info_of
from ep_fx.graph.manifest import MESH_DIMS, MeshSpec, ParameterSpec
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.places import Places, group_argument
from ep_fx.graph.roles import Role, is_collective, role_of
from ep_fx.graph.sizes import TypicalSizes
from ep_fx.graph.texts import group_text
from ep_fx.graph.values import Size, SymbolNames, bytes_of, bytes_text

_ROWS = sympy.Symbol("R", integer=True, nonnegative=True)


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind in one direction.

    Args:
        phase: direction.
        kind: ``unshard``, ``dispatch counts``, ``dispatch``, ``combine``, ``reduce_grad``, ...
        dims: mesh dimensions of the group, ``"fsdp,ep"``.
        count: how many.
        bytes: bytes of all of them on one rank, where known.
        formula: the same as text, in rows ``R`` and sizes ``s0, s1, ..`` where they are known only at run time.
        ranks: ranks of the group; None for a group that is not of the mesh.
        typical: bytes at the sizes of the trace and on balanced routing (`TypicalSizes`), where anything is known.
    """

    phase: Phase
    kind: str
    dims: str
    count: int
    bytes: int | None
    formula: str
    ranks: int | None = None
    typical: int | None = None


def summarise(graph: ParallelGraph, sizes: TypicalSizes | None = None) -> tuple[CollectiveRow, ...]:
    """One row for each kind of collective, direction and group, in order of first appearance.

    Args:
        sizes: numbers for sizes that are free; None: those of the trace.
    """
    places, symbols, sizes = Places(graph), SymbolNames(graph), sizes or TypicalSizes(graph)
    found: dict[tuple[Phase, str, str], list[Size | None]] = {}
    mesh = graph.manifest.mesh
    for node in graph:
        if is_collective(node):
            dims = group_text(group_argument(node) or "?", mesh)
            key = (info_of(node).phase, collective_kind(node, places), dims)
            found.setdefault(key, []).append(traced_bytes(node, places))
    ordered = sorted(found.items(), key=lambda item: item[0][0] is Phase.BACKWARD)
    rows = []
    for key, moved in ordered:
        known = [sizes.number(size) for size in moved if size is not None]
        row = _row(*key, [None if size is None else symbols.rename(size) for size in moved])
        rows.append(replace(row, ranks=_ranks(row.dims, mesh), typical=sum(known) if known else None))
    return tuple(rows)


def _ranks(dims: str, mesh: MeshSpec) -> int | None:
    names = tuple(dims.split(","))
    return mesh.size(*names) if set(names) <= set(MESH_DIMS) else None


def collective_kind(node: fx.Node, places: Places) -> str:
    """What a collective is for: the name of its operator, or the part of a region's exchange that it is."""
    part = places.exchange_part(node)
    if part is None:
        return role_of(node).value.split("::")[-1] if role_of(node) is not Role.OTHER else str(node.target)
    return f"{places[node].action.value} {part}" if part == "counts" else places[node].action.value


def format_summary(rows: Sequence[CollectiveRow]) -> str:
    """The rows as an aligned text table."""
    cells = [("direction", "collective", "over", "count", "bytes a rank")]
    cells += [(r.phase.value, r.kind, r.dims, str(r.count), _amount(r)) for r in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]) + "\n"


def _amount(row: CollectiveRow) -> str:
    return row.formula if row.bytes is None else bytes_text(row.bytes)


def moved_bytes(node: fx.Node, places: Places, symbols: SymbolNames) -> Size | None:
    """`traced_bytes` with the symbols of the graph's text."""
    size = traced_bytes(node, places)
    return None if size is None else symbols.rename(size)


def traced_bytes(node: fx.Node, places: Places) -> Size | None:
    """Bytes of a collective on one rank: the gathered result of a gather, the argument of everything else; a formula in
    the trace's own symbols where they depend on sizes.

    Where no value is recorded, the bytes of the shards of its parameters.
    """
    if role_of(node) is Role.UNSHARD:
        size = bytes_of(node.meta.get("val"))
    else:
        size = bytes_of(fx.map_arg(node.args[0], lambda n: n.meta.get("val")))
    if size is None and node in places.lists:
        return sum(spec.full_bytes // full * part for spec in places.lists[node] for full, part in (_cut(spec),))
    return size


def _cut(spec: ParameterSpec) -> tuple[int, int]:
    """Length of a parameter along the dimension that is cut, whole and of one shard."""
    layout = spec.layout
    return (max(1, layout.full_shape[layout.shard_dim]), layout.padded_size) if layout.full_shape else (1, 1)


def _row(phase: Phase, kind: str, dims: str, sizes: list[Size | None]) -> CollectiveRow:
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return CollectiveRow(phase, kind, dims, len(sizes), None, "unknown")
    total = sympy.sympify(sum(known))
    if total.is_number:
        return CollectiveRow(phase, kind, dims, len(sizes), int(total), str(int(total)))
    return CollectiveRow(phase, kind, dims, len(sizes), None, str(_in_rows(known)))


def _in_rows(sizes: Sequence[Size]) -> Size:
    """The sum of `sizes`, with R for the number of rows of each where that is known only at run time."""
    total: Size = 0
    for size in sizes:
        value = sympy.expand(size)
        unknown = sorted((s for s in value.free_symbols if s.name.startswith("u")), key=str)
        factors = {value.coeff(symbol) for symbol in unknown}
        if len(factors) == 1:
            factor = factors.pop()
            value = value - factor * sum(unknown) + factor * _ROWS
        total = total + value
    return total
