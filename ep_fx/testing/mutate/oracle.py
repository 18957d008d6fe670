"""The judge of mutants: it runs them, and knows nothing of rules.

A mutant is at fault where, on real ranks, it hangs, raises, or differs from the valid graph in

    numbers       outputs, gradients, buffers: values, shapes, types, of two interleaved micro-batches
    collectives   which, how many, over which group, with what; ranks that disagree on their order; waits
    memory        bytes saved for backward, bytes unsharded over time and at the end of each half, storage freed
    policy        experts gathered before rows travel and, strictly, until they are back

What is left differs in nothing that matters: the same run, perhaps in another order.
"""
from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch

from ep_fx.graph import ParallelGraph, split
from ep_fx.testing.collective_log import Event, assert_same_sequence
from ep_fx.testing.mutate.execute import Code, Outcome, Setting, execute
from ep_fx.testing.mutate.subject import Subject
from ep_fx.testing.mutate.wire import to_wire
from ep_fx.testing.ranks import RankError, RankPool

_TOLERANCE = 1e-5
_EXCHANGES = frozenset(
    {
        "_c10d_functional::all_to_all_single", "ep_fx::dispatch", "ep_fx::combine", "ep_fx::dispatch_backward",
        "ep_fx::combine_backward",
    }
)


class Oracle:
    """Runs graphs of subjects on real ranks.

    Args:
        limit: seconds that a mutant may take before it counts as hanging; more where the valid graph itself is slow.
    """

    def __init__(self, limit: float = 5.0) -> None:
        self.limit = limit
        self._pools: dict[int, RankPool] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="ep_fx_mutants_")
        self._valid: dict[str, list[Outcome]] = {}
        self._limits: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()
        self._scratch.cleanup()

    def faults(self, subject: Subject, graphs: Sequence[ParallelGraph]) -> list[str]:
        """What is wrong with a run of `graphs`, one for each rank; empty where they are as good as the valid graph.

        Raises:
            RuntimeError: the valid graph itself does not run.
        """
        if subject.name not in self._valid:
            self._save(subject)
            outcomes = self._run(subject, [subject.graph] * subject.world_size, 60.0)
            started = time.monotonic()  # the ranks are warm now
            outcomes = self._run(subject, [subject.graph] * subject.world_size, 60.0)
            self._limits[subject.name] = max(self.limit, 5 * (time.monotonic() - started))
            if isinstance(outcomes, str) or any(o.error for o in outcomes):
                raise RuntimeError(f"the valid graph of {subject.name} does not run: {outcomes}")
            self._valid[subject.name] = outcomes
        try:
            outcomes = self._run(subject, graphs, self._limits[subject.name])
        except (KeyError, ValueError, RuntimeError) as error:  # cannot even be cut in two
            return [f"cannot be built: {type(error).__name__}: {error}"]
        if isinstance(outcomes, str):
            return [outcomes]
        return list(_differences(subject, self._valid[subject.name], outcomes))

    def _path(self, subject: Subject) -> Path:
        return Path(self._scratch.name) / f"{subject.name.replace('/', '_')}.pt"

    def _save(self, subject: Subject) -> None:
        setting = Setting(subject.graph.manifest, subject.parameters, subject.buffers, subject.batches)
        torch.save(setting, self._path(subject))

    def _run(self, subject: Subject, graphs: Sequence[ParallelGraph], limit: float) -> list[Outcome] | str:
        made = {id(graph): _code(graph) for graph in graphs}
        pool = self._pools.setdefault(subject.world_size, RankPool(subject.world_size))
        limit += 0.0 if pool.pids else 10.0  # new ranks have groups to make and modules to import
        try:
            outcomes = pool.run(execute, str(self._path(subject)), [made[id(g)] for g in graphs], timeout=limit)
        except TimeoutError:
            return "hangs"
        except RankError as error:
            return f"crashes: {error.report.strip().splitlines()[-1]}"
        if not _in_step(outcomes):
            pool.close()  # one rank raised and left the others somewhere else
        return outcomes


def _code(graph: ParallelGraph) -> Code:
    halves = split(graph)
    manifest = graph.manifest
    order = [p.placeholder for p in manifest.parameters] + [b.placeholder for b in manifest.buffers]
    order += [*manifest.inputs, *manifest.tangents]
    assert halves.backward is not None
    inputs = tuple(order.index(name) for name in halves.placeholders)
    return Code(to_wire(halves.forward), to_wire(halves.backward), inputs, graph.constants)


def _in_step(outcomes: Sequence[Outcome]) -> bool:
    """Whether all ranks stopped after the same collectives, so that the next run finds nothing half done."""
    if all(o.error is None for o in outcomes):
        return all(o.waits == outcomes[0].waits for o in outcomes)
    started = [[e.op for e in o.events if e.is_collective] for o in outcomes]
    done = all(o.waits == len(s) for o, s in zip(outcomes, started, strict=True))
    return done and all(s == started[0] for s in started)


# -- comparison ----------------------------------------------------------------------------------------------------
def _differences(subject: Subject, valid: Sequence[Outcome], got: Sequence[Outcome]) -> Iterator[str]:
    for rank, (old, new) in enumerate(zip(valid, got, strict=True)):
        if new.error is not None:
            yield f"rank {rank} raises {new.error}"
        else:
            yield from (f"rank {rank}: {difference}" for difference in _of_rank(subject, old, new))
    try:
        assert_same_sequence([o.events for o in got])
    except AssertionError as error:
        yield str(error).splitlines()[0]


def _of_rank(subject: Subject, old: Outcome, new: Outcome) -> Iterator[str]:
    yield from _numbers(old, new)
    collectives = [Counter((e.op, e.group, e.dtype, e.shapes) for e in o.events if e.is_collective) for o in (old, new)]
    for key in (collectives[0] - collectives[1]) + (collectives[1] - collectives[0]):
        yield f"{collectives[1][key]} times {key[0]} of {key[3]} over {key[1]}, not {collectives[0][key]}"
    if new.waits != old.waits or new.early:
        yield f"{new.waits} waits, not {old.waits}; read before their wait: {new.early[:3]}"
    yield from _memory(old, new)
    yield from _policy(subject, old.events, new.events)


def _numbers(old: Outcome, new: Outcome) -> Iterator[str]:
    if old.values.keys() != new.values.keys():
        yield f"values {sorted(old.values.keys() ^ new.values.keys())[:3]}"
    for name in old.values.keys() & new.values.keys():
        a, b = old.values[name], new.values[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{name} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        elif not torch.equal(a, b):
            scale = float(a.double().norm()) or 1.0
            error = float((a.double() - b.double()).norm()) / scale
            if not error <= _TOLERANCE:
                yield f"{name} differs by {error:.2g}"


def _memory(old: Outcome, new: Outcome) -> Iterator[str]:
    pairs = [("saved", a, b) for a, b in zip(old.saved_bytes, new.saved_bytes, strict=False)]
    pairs += [("unsharded after a half", a, b) for a, b in zip(old.live_bytes, new.live_bytes, strict=False)]
    pairs += [("unsharded at most", old.peak_bytes, new.peak_bytes)]
    if old.operators == new.operators:
        pairs += [("unsharded, summed over time,", old.byte_time, new.byte_time)]
    yield from (f"bytes {what} {b}, not {a}" for what, a, b in pairs if b > a)
    freed = [sum(len(e.storage_bytes) for e in o.events if e.op == "ep_fx::reshard") for o in (old, new)]
    if freed[0] != freed[1] or any(any(e.storage_bytes) for e in new.events):
        yield f"{freed[1]} values freed, not {freed[0]}"


def _policy(subject: Subject, old: Sequence[Event], new: Sequence[Event]) -> Iterator[str]:
    """How many exchanges experts' weights stand behind: no more where they are gathered, no fewer where freed."""
    manifest = subject.graph.manifest
    experts = {manifest.names[n].layout.full_shape for r in manifest.regions for n in r.parameters}
    strict = manifest.expert_reshard == "strict"
    for op, worse in (("ep_fx::unshard_wait", 1), ("ep_fx::reshard", -1)):
        if op == "ep_fx::reshard" and not strict:
            continue
        before, after = (_exchanges_before(events, op, experts) for events in (old, new))
        if any((b - a) * worse > 0 for a, b in zip(before, after, strict=False)):
            yield f"{op} of experts behind {after} exchanges, not {before}"


def _exchanges_before(events: Sequence[Event], op: str, shapes: set[tuple[int, ...]]) -> list[int]:
    count, found = 0, []
    for event in events:
        if event.op in _EXCHANGES:
            count += 1
        elif event.op == op and event.shapes and set(event.shapes) <= shapes:
            found.append(count)
    return found
