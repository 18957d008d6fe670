"""How many bytes of gathered parameters are alive after each node: what a schedule costs in memory, before any run.

    unshard              the gathered buffer begins
    assemble             the whole parameter begins, the blocks end once nobody reads them any more
    reshard              the whole parameter ends

Read off the graph and the Manifest alone: bytes are those that every rank holds, padding included. One walk, O(nodes).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from ep_fx.graph import ParallelGraph, ParameterSpec, Phase
from ep_fx.graph.aliases import Aliases
from ep_fx.graph.gathers import Gather, Gathers
from ep_fx.graph.phases import boundary


class Peak(NamedTuple):
    """The most that is gathered at one moment.

    Args:
        bytes: of gathered parameters, assembled copies and padding included.
        units: the most FSDP units of which something is gathered at one moment, not necessarily this one.
        node: after which the bytes are reached first; None for a graph that gathers nothing.
    """

    bytes: int
    units: int
    node: fx.Node | None


class _Span(NamedTuple):
    """Memory of one gather: alive after the nodes at ``start <= position < end``."""

    start: int
    end: int
    bytes: int
    unit: str


class Life(NamedTuple):
    """One FSDP unit gathered once: alive after the nodes at ``start <= position < end``, `bytes` at most.

    `end` is the number of nodes where nothing frees it.
    """

    unit: str
    start: int
    end: int
    bytes: int


def lives(graph: ParallelGraph) -> list[Life]:
    """Every gathering of a unit, in order; a gather that several units share has one life for each."""
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}
    found: list[Life] = []
    for gathers in Gathers(graph.manifest, Aliases(nodes)).of_unshard.values():
        units: dict[str, list[_Span]] = {}
        for gather in gathers:
            for span in _spans_of(gather, position):
                units.setdefault(span.unit, []).append(span)
        for unit, spans in units.items():
            start, end = min(s.start for s in spans), max(s.end for s in spans)
            most = max(_running([s._replace(start=s.start - start, end=s.end - start) for s in spans], end - start))
            found.append(Life(unit, start, end, most))
    return found


def live_unsharded_bytes(graph: ParallelGraph) -> list[tuple[fx.Node, int]]:
    """Bytes of gathered parameters alive after each node, in order."""
    nodes = list(graph)
    return list(zip(nodes, _running(_spans(graph, nodes), len(nodes)), strict=True))


def peak(graph: ParallelGraph) -> Peak:
    """The peak of the whole step."""
    nodes = list(graph)
    return _peak(nodes, _spans(graph, nodes), 0, len(nodes))


def peaks(graph: ParallelGraph) -> dict[Phase, Peak]:
    """The peak of each half; a graph without backward has one half."""
    nodes = list(graph)
    spans, cut = _spans(graph, nodes), boundary(graph)
    if cut is None:
        return {Phase.FORWARD: _peak(nodes, spans, 0, len(nodes))}
    return {
        Phase.FORWARD: _peak(nodes, spans, 0, cut.latest),
        Phase.BACKWARD: _peak(nodes, spans, cut.latest, len(nodes)),
    }


def gathered_bytes(parameter: ParameterSpec) -> int:
    """Bytes of the buffer that a gather of `parameter` fills: the blocks of all ranks, each padded to the largest."""
    layout = parameter.layout
    if layout.is_even:
        return parameter.full_bytes
    along = layout.full_shape[layout.shard_dim]
    rest = parameter.full_bytes // along if along else 0
    return rest * layout.padded_size * len(layout.shard_sizes)


def _spans(graph: ParallelGraph, nodes: Sequence[fx.Node]) -> list[_Span]:
    position = {node: index for index, node in enumerate(nodes)}
    gathers = Gathers(graph.manifest, Aliases(nodes))
    return [span for gather in gathers.all for span in _spans_of(gather, position)]


def _spans_of(gather: Gather, position: dict[fx.Node, int]) -> list[_Span]:
    if gather.parameter is None:
        return []
    parameter, start, never = gather.parameter, position[gather.unshard], len(position)
    end = min((position[r] for r in gather.reshards), default=never)
    if not gather.assembled:
        return [_Span(start, end, gathered_bytes(parameter), parameter.unit)]
    read = max(position[r] for r in gather.block_readers)
    freed = min([read, *(position[r] for r in gather.block_reshards)])
    blocks = _Span(start, freed, gathered_bytes(parameter), parameter.unit)
    return [blocks, *(_Span(position[a], end, parameter.full_bytes, parameter.unit) for a in gather.assembled)]


def _running(spans: Sequence[_Span], length: int) -> list[int]:
    """Bytes alive after each position."""
    change = [0] * (length + 1)
    for span in spans:
        if span.start < span.end:
            change[span.start] += span.bytes
            change[span.end] -= span.bytes
    total, found = 0, []
    for step in change[:length]:
        total += step
        found.append(total)
    return found


def _peak(nodes: Sequence[fx.Node], spans: Sequence[_Span], start: int, end: int) -> Peak:
    alive = _running(spans, len(nodes))[start:end]
    most = max(alive, default=0)
    if not most:
        return Peak(0, 0, None)
    return Peak(most, _most_units(spans, start, end), nodes[start + alive.index(most)])


def _most_units(spans: Sequence[_Span], start: int, end: int) -> int:
    """The most units of which something is alive after one node between `start` and `end`."""
    edges = [(max(s.start, start), 1, s.unit) for s in spans if s.start < s.end]
    edges += [(s.end, -1, s.unit) for s in spans if s.start < s.end]
    counts: dict[str, int] = {}
    most = 0
    for place, step, unit in sorted(edges):
        counts[unit] = counts.get(unit, 0) + step
        if start <= place < end:
            most = max(most, sum(count > 0 for count in counts.values()))
    return most
