"""``.perfetto.json``: a trace in the published trace event format, in the object form.

From the format: every event has ``name``, ``ph``, ``pid`` and a ``ts`` in microseconds; X has ``dur``; C has numbers
as ``args``; M names a process or thread; s and f share ``id``, ``cat`` and ``name``, and lie inside a slice of their
thread.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from ep_fx.cost.liveness import peak
from ep_fx.graph import ParallelGraph, is_collective
from ep_fx.testing.synthetic import parallel_step
from ep_fx.viz import to_perfetto

Event = dict[str, Any]
COMMON = {"name": str, "ph": str, "pid": int, "ts": (int, float)}
FIELDS: dict[str, dict[str, Any]] = {
    "X": {**COMMON, "cat": str, "tid": int, "dur": (int, float), "args": dict},
    "C": {**COMMON, "args": dict},
    "M": {**COMMON, "tid": int, "args": dict},
    "s": {**COMMON, "cat": str, "tid": int, "id": int},
    "f": {**COMMON, "cat": str, "tid": int, "id": int, "bp": str},
}


@pytest.fixture(scope="module")
def trace(graph: ParallelGraph) -> dict[str, Any]:
    return json.loads(to_perfetto(graph))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def events(trace: dict[str, Any]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def test_every_event_has_the_fields_of_its_phase(trace: dict[str, Any], events: dict[str, list[Event]]) -> None:
    assert set(trace) == {"displayTimeUnit", "traceEvents", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert set(events) == set(FIELDS)
    for phase, members in events.items():
        for event in members:
            assert set(event) == set(FIELDS[phase]), event
            assert all(isinstance(event[name], kind) for name, kind in FIELDS[phase].items()), event
            assert event["ts"] >= 0
            assert event.get("dur", 1) > 0


def test_lanes_are_named_and_hold_what_their_name_says(graph: ParallelGraph, events: dict[str, list[Event]]) -> None:
    lanes = {e["tid"]: e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"}
    assert set(lanes.values()) == {"compute", "FSDP gather", "EP exchange", "FSDP reduce"}
    kinds = defaultdict(set)
    for event in events["X"]:
        kinds[lanes[event["tid"]]].add(event["name"].split()[0])
    assert kinds["FSDP gather"] == {"gather"}
    assert kinds["EP exchange"] == {"dispatch", "combine"}
    assert kinds["FSDP reduce"] == {"reduce"}
    travelling = [e for e in events["X"] if lanes[e["tid"]] != "compute"]
    assert len(travelling) == sum(is_collective(node) for node in graph)


def test_slices_of_one_lane_do_not_overlap() -> None:
    lanes: dict[int, list[Event]] = defaultdict(list)
    for event in json.loads(to_perfetto(parallel_step(3)))["traceEvents"]:
        if event["ph"] == "X":
            lanes[event["tid"]].append(event)
    for members in lanes.values():
        for one, other in pairwise(members):
            assert round(1e3 * (one["ts"] + one["dur"])) <= round(1e3 * other["ts"])


def test_the_counter_reaches_the_peak_and_falls_back_to_nothing(
    graph: ParallelGraph, events: dict[str, list[Event]]
) -> None:
    values = [event["args"]["bytes"] for event in sorted(events["C"], key=lambda e: e["ts"])]
    assert max(values) == peak(graph).bytes
    assert values[-1] == 0


def test_arrows_lead_from_dispatch_to_combine_inside_their_slices(events: dict[str, list[Event]]) -> None:
    ends = {event["id"]: event for event in events["f"]}
    assert len(events["s"]) == len(ends) == 2
    for start in events["s"]:
        end = ends[start["id"]]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        names = [
            [s["name"] for s in events["X"] if s["tid"] == e["tid"] and s["ts"] <= e["ts"] <= s["ts"] + s["dur"]]
            for e in (start, end)
        ]
        assert [[name.rsplit(" ", 1)[0] for name in found] for found in names] in (
            [["dispatch"], ["combine"]], [["combine backward"], ["dispatch backward"]]
        )
