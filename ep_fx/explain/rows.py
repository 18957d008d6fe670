"""The facts of a step as rows: units, host syncs, values kept for backward, peaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ep_fx.cost import peaks
from ep_fx.explain.names import Subject
from ep_fx.graph import ParameterSpec, Phase, Role, role_of, target_name
from ep_fx.graph.aliases import Memory
from ep_fx.graph.split import saved_values
from ep_fx.graph.values import bytes_of, expression

_READ_BACK = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"})
_EP_SIZE = 3
"""Place of the number of ranks of its exchange among the arguments of a dispatch."""
_OURS = ("ep_fx::", "_c10d_functional::")


@dataclass(frozen=True)
class UnitRow:
    """One FSDP unit.

    Args:
        name: its name.
        kind: ``dense`` or ``experts``.
        parameters: how many.
        over, ranks: mesh dimensions that it is gathered over, and how many ranks that is.
        shard_bytes, full_bytes: what one rank holds of it, and what a gather makes of that.
        gathers: how often it is gathered in forward and in backward.
    """

    name: str
    kind: str
    parameters: int
    over: tuple[str, ...]
    ranks: int
    shard_bytes: int
    full_bytes: int
    gathers: tuple[int, int]


@dataclass(frozen=True)
class SyncRow:
    """One node at which the host waits for the device.

    Args:
        node, module, source: where.
        phase: in which half.
        why: what the host reads back.
    """

    node: str
    module: str | None
    source: str | None
    phase: Phase
    why: str


@dataclass(frozen=True)
class SavedRow:
    """One value that forward keeps for backward.

    Args:
        node, module, source: what makes it.
        type: its type, ``f32[s0, 64]``.
        bytes: at typical sizes; 0 where nothing is known.
        formula: bytes as text, in symbols where they depend on sizes.
        shares: whether its memory is that of a value further up, or of a parameter or an input: it costs nothing more.
        kept: bytes that stay in memory because of it and of no value further up, at typical sizes: all of the memory
            that it is a view of, also where no kept value reaches; 0 where it shares.
    """

    node: str
    module: str | None
    source: str | None
    type: str
    bytes: int
    formula: str
    shares: bool
    kept: int


@dataclass(frozen=True)
class PeakRow:
    """The most that is gathered at one moment of a half: bytes, units, and the node after which that is."""

    phase: Phase
    bytes: int
    units: int
    node: str | None
    module: str | None


def unit_rows(subject: Subject) -> Iterator[UnitRow]:
    """One row for each unit, in order."""
    mesh, facts = subject.graph.manifest.mesh, subject.facts
    count: dict[str, list[int]] = {}
    for unshard, gathers in facts.gathers.of_unshard.items():
        for unit in {g.parameter.unit for g in gathers if g.parameter is not None}:
            count.setdefault(unit, [0, 0])[facts.is_backward(unshard)] += 1
    for name, members in subject.graph.manifest.units.items():
        over = next((p.layout.gather_dims for p in members if p.layout.gather_dims), ())
        forward, backward = count.get(name, (0, 0))
        yield UnitRow(
            name=name,
            kind="experts" if any(p.layout.is_expert for p in members) else "dense",
            parameters=len(members),
            over=over,
            ranks=mesh.size(*over),
            shard_bytes=sum(map(_shard_bytes, members)),
            full_bytes=sum(p.full_bytes for p in members),
            gathers=(forward, backward),
        )


def _shard_bytes(parameter: ParameterSpec) -> int:
    """Bytes of the largest shard of a parameter."""
    layout = parameter.layout
    along = layout.full_shape[layout.shard_dim] if layout.full_shape else 0
    return parameter.full_bytes // along * max(layout.shard_sizes) if along else parameter.full_bytes


def sync_rows(subject: Subject) -> Iterator[SyncRow]:
    """One row for each node that makes the host wait: splits of an exchange, and whatever reads a value to go on."""
    for node in subject.graph:
        why = _read_back(node)
        if why is not None:
            where = subject.where(node)
            phase = Phase.BACKWARD if subject.facts.is_backward(node) else Phase.FORWARD
            yield SyncRow(where.node, where.module, where.source, phase, why)


def _read_back(node: fx.Node) -> str | None:
    if role_of(node) is Role.DISPATCH and node.args[_EP_SIZE] == 1:
        return "how many rows the experts get: no exchange, all are this rank's"
    if role_of(node) in (Role.CONTEXT, Role.DISPATCH):
        return "the splits of the token exchange: how many rows go to each rank and come from it"
    name = target_name(node)
    if node.op != "call_function" or name.startswith(_OURS) or role_of(node) is Role.GETITEM:
        return None
    if name in _READ_BACK:
        return f"{name.split('::')[1]}: a value of a tensor"
    known = {symbol for source in node.all_input_nodes for symbol in _unbacked(source.meta.get("val"))}
    new = _unbacked(node.meta.get("val")) - known
    return f"{name.split('::')[-1]}: the size of its result" if new else None


def _unbacked(value: object) -> set[str]:
    """Symbols in `value` that stand for sizes known only at run time."""
    if isinstance(value, (list, tuple)):
        return {symbol for item in value for symbol in _unbacked(item)}
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,) if isinstance(value, torch.SymInt) else ()
    symbols = {str(s) for size in sizes for s in getattr(expression(size), "free_symbols", ())}
    return {symbol for symbol in symbols if symbol.startswith(("u", "zu"))}


def saved_rows(subject: Subject) -> Iterator[SavedRow]:
    """One row for each value that goes from forward to backward, in order of its first use there."""
    sizes, symbols, aliases = subject.sizes, subject.text.symbols, subject.facts.aliases
    updated = {buffer.placeholder for buffer in subject.graph.manifest.buffers if buffer.mutated}
    seen: set[Memory] = set()
    for node in saved_values(subject.graph):
        where, value = subject.where(node), node.meta.get("val")
        size = bytes_of(value)
        memory = aliases.memory(node)
        copied = any(root.target in updated for root, _ in memory)
        new = [m for m in memory if m not in seen and m[0].op != "placeholder"]
        seen.update(new)
        yield SavedRow(
            node=where.node,
            module=where.module,
            source=where.source,
            type=symbols.type(value),
            bytes=0 if size is None else sizes.number(size),
            formula="0" if size is None else str(symbols.rename(size)),
            shares=bool(memory) and not new and not copied,
            kept=sizes.bytes(value) if copied else sum(sizes.bytes(_value(m)) for m in new),
        )


def _value(memory: Memory) -> object:
    """The value with which memory begins, all of which stays while a view of it does."""
    node, index = memory
    value = node.meta.get("val")
    if index is None:
        return value
    if isinstance(value, (list, tuple)):
        return value[index]
    return next((user.meta.get("val") for user in node.users if user.args[1:] == (index,)), None)  # of a context


def peak_rows(subject: Subject) -> Iterator[PeakRow]:
    """One row for each half."""
    for phase, peak in peaks(subject.graph).items():
        if peak.node is None:
            yield PeakRow(phase, 0, 0, None, None)
            continue
        where = subject.where(peak.node)
        yield PeakRow(phase, peak.bytes, peak.units, where.node, where.module)
