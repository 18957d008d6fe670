"""A step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    X  one slice for each node that takes time, on the lane of compute, FSDP gather, EP exchange or FSDP reduce
    C  bytes of gathered parameters, at each change
    s, f  arrows from a dispatch to its combine, and from combine_backward to dispatch_backward

Times are those of a nominal machine (`cost.timeline`): they show order and overlap, they are not measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import fx

from ep_fx.cost.liveness import live_unsharded_bytes
from ep_fx.cost.timeline import Lane, Slice, Timeline, moved, timeline
from ep_fx.graph import ParallelGraph, Phase, info_of, is_collective
from ep_fx.graph.places import Places, group_argument
from ep_fx.graph.printer import GraphText
from ep_fx.graph.sizes import TypicalSizes
from ep_fx.graph.texts import group_text, mesh_text

_PID = 0
_TICKS = 1000
"""Nanoseconds in the format's unit, the microsecond."""
_THREADS = {lane: index + 1 for index, lane in enumerate(Lane)}


def to_perfetto(graph: ParallelGraph) -> str:
    """The JSON text, in the object form of the trace event format."""
    text, sizes, line = GraphText(graph), TypicalSizes(graph), timeline(graph)
    used = {piece.lane for piece in line.slices} | {Lane.COMPUTE}
    events = [
        *_names([lane for lane in Lane if lane in used]),
        *(_slice(piece, text, sizes) for piece in line.slices),
        *_counters(graph, line),
        *_arrows(text.places, line),
    ]
    about = {"mesh": mesh_text(graph.manifest.mesh), "times": "of a nominal machine, not measured"}
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events, "otherData": about}) + "\n"


def _names(lanes: list[Lane]) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", 0, name="one rank")
    for lane in lanes:
        yield _meta("thread_name", _THREADS[lane], name=lane.value)
        yield _meta("thread_sort_index", _THREADS[lane], sort_index=_THREADS[lane])


def _meta(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PID, "tid": thread, "ts": 0, "args": args}


def _slice(piece: Slice, text: GraphText, sizes: TypicalSizes) -> dict[str, Any]:
    node, info, place = piece.node, info_of(piece.node), text.places[piece.node]
    start, end = _ticks(piece.start), _ticks(piece.start + piece.duration)
    args: dict[str, Any] = {"node": f"%{text.names[node]}", "phase": info.phase.value}
    args |= {key: value for key, value in (("module", info.fqn), ("source", info.source)) if value}
    name = f"wait %{text.names[node]}" if piece.stalled else text.names[node]
    if is_collective(node):
        name = f"{place.action.value} {place.subject}"
        over = group_text(group_argument(node) or "?", text.graph.manifest.mesh)
        args |= {"over": over, "bytes": moved(node, sizes)}
    return {
        "name": name,
        "cat": "stall" if piece.stalled else info.phase.value,
        "ph": "X",
        "pid": _PID,
        "tid": _THREADS[piece.lane],
        "ts": start / _TICKS,
        "dur": (end - start) / _TICKS,
        "args": args,
    }


def _ticks(seconds: float) -> int:
    """Nanoseconds: what ends when another begins must not overlap it by a rounding error."""
    return round(seconds * 1e9)


def _counters(graph: ParallelGraph, line: Timeline) -> Iterator[dict[str, Any]]:
    """At each moment the last value: nodes that take no time share theirs."""
    changes: dict[float, int] = {}
    for node, alive in live_unsharded_bytes(graph):
        changes[line.passed[node]] = alive
    last = None
    for at, alive in changes.items():
        if alive != last:
            last = alive
            where = {"pid": _PID, "ts": _ticks(at) / _TICKS}
            yield {"name": "gathered bytes", "ph": "C", **where, "args": {"bytes": alive}}


def _arrows(places: Places, line: Timeline) -> Iterator[dict[str, Any]]:
    """From the exchange that sends the rows of a region to the one that returns them, in each half."""
    sent: dict[tuple[fx.Node, Phase], Slice] = {}
    number = 0
    for piece in line.slices:
        node, part = piece.node, places.exchange_part(piece.node)
        context = places.context(node) if part in ("send", "return") else None
        if context is None:
            continue
        key = (context, info_of(node).phase)
        if part == "send":
            sent[key] = piece
        elif key in sent:
            number += 1
            yield from _arrow(sent.pop(key), piece, number)


def _arrow(start: Slice, end: Slice, number: int) -> Iterator[dict[str, Any]]:
    """Both ends lie inside the slice that they belong to."""
    for piece, kind in ((start, {"ph": "s"}), (end, {"ph": "f", "bp": "e"})):
        at = _ticks(piece.start + piece.duration / 2) / _TICKS
        place = {"pid": _PID, "tid": _THREADS[piece.lane], "ts": at}
        yield {"name": "rows out and back", "cat": "exchange", "id": number, **place, **kind}
