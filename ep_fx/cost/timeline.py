"""A step as it would run on a nominal machine: when each node computes, when each collective travels, who waits.

    compute      one node after the other, in graph order; a wait stalls until its collective has arrived
    gather, reduce, exchange      one lane each; a collective starts when it is issued and its lane is free

Durations come from bytes and multiply-adds at typical sizes (`graph.sizes`), so the picture shows order, overlap and
proportion; it predicts no run. Views and bookkeeping take no time. One walk, O(nodes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, is_collective, role_of, target_name
from ep_fx.graph.roles import WAIT_OF
from ep_fx.graph.sizes import TypicalSizes


@dataclass(frozen=True)
class Machine:
    """What durations are worked out from.

    Args:
        flops: floating-point operations a second.
        memory: bytes a second that a kernel reads and writes.
        network: bytes a second of a collective on one rank.
        launch: seconds that every kernel takes at least.
        latency: seconds that every collective takes at least.
        sync: seconds that the host needs to read back a tensor.
    """

    flops: float = 400e12
    memory: float = 2e12
    network: float = 50e9
    launch: float = 3e-6
    latency: float = 15e-6
    sync: float = 10e-6


class Lane(Enum):
    """Where something takes place."""

    COMPUTE = "compute"
    GATHER = "FSDP gather"
    EXCHANGE = "EP exchange"
    REDUCE = "FSDP reduce"
    OTHER = "other collectives"


@dataclass(frozen=True)
class Slice:
    """One node at work, or waiting (`stalled`): seconds from the start of the step."""

    node: fx.Node
    lane: Lane
    start: float
    duration: float
    stalled: bool = False


@dataclass
class Timeline:
    """The slices in graph order, and for each node the moment at which the host is past it."""

    slices: list[Slice] = field(default_factory=list)
    passed: dict[fx.Node, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """When the last slice ends."""
        return max((s.start + s.duration for s in self.slices), default=0.0)

    @property
    def stalled(self) -> float:
        """Seconds that the compute lane waits for collectives."""
        return sum(s.duration for s in self.slices if s.stalled)


_LANES = {
    Role.UNSHARD: Lane.GATHER, Role.REDUCE_GRAD: Lane.REDUCE, Role.ALL_REDUCE_GRAD: Lane.REDUCE,
    Role.EXCHANGE: Lane.EXCHANGE,
}
_WAITS = frozenset(WAIT_OF.values())
_FREE = frozenset({Role.PLACEHOLDER, Role.OUTPUT, Role.GETITEM, Role.RESHARD})
_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "ep_fx::grouped_mm"})
_ATTENTION = frozenset({"ep_fx::attention", "ep_fx::attention_backward"})


def timeline(graph: ParallelGraph, machine: Machine | None = None) -> Timeline:
    """The step of `graph` on `machine`; the default one is of no particular make."""
    machine, sizes, found = machine or Machine(), TypicalSizes(graph), Timeline()
    clock, free, arrival = 0.0, dict.fromkeys(Lane, 0.0), dict[fx.Node, float]()
    for node in graph:
        role = role_of(node)
        if is_collective(node):
            lane = _LANES.get(role, Lane.OTHER)
            start = max(clock, free[lane])
            duration = machine.latency + moved(node, sizes) / machine.network
            arrival[node] = free[lane] = start + duration
            found.slices.append(Slice(node, lane, start, duration))
        elif role in _WAITS and node.args[0] in arrival:
            until = arrival[node.args[0]]  # type: ignore[index]
            if until > clock:
                found.slices.append(Slice(node, Lane.COMPUTE, clock, until - clock, stalled=True))
                clock = until
        elif not _takes_no_time(node, role):
            duration = machine.sync if role is Role.CONTEXT else _duration(node, sizes, machine)
            found.slices.append(Slice(node, Lane.COMPUTE, clock, duration))
            clock += duration
        found.passed[node] = clock
    return found


def moved(node: fx.Node, sizes: TypicalSizes) -> int:
    """Bytes of a collective's larger side on one rank."""
    return max(sizes.bytes(node.meta.get("val")), sum(sizes.bytes(value) for value in _inputs(node)))


def _takes_no_time(node: fx.Node, role: Role) -> bool:
    """Bookkeeping, sizes and views: nothing runs on the device."""
    if node.op != "call_function" or role in _FREE:
        return True
    if role is Role.CONTEXT:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    returns = node.target._schema.returns
    view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return view or isinstance(node.meta.get("val"), (torch.SymInt, int))


def _duration(node: fx.Node, sizes: TypicalSizes, machine: Machine) -> float:
    touched = sizes.bytes(node.meta.get("val")) + sum(sizes.bytes(value) for value in _inputs(node))
    return machine.launch + max(touched / machine.memory, flops(node, sizes) / machine.flops)


def _inputs(node: fx.Node) -> Iterator[object]:
    for source in node.all_input_nodes:
        yield source.meta.get("val")


def flops(node: fx.Node, sizes: TypicalSizes) -> int:
    """Floating-point operations of a matrix product or of an attention; 0 for everything else."""
    name, value = target_name(node), node.meta.get("val")
    shapes = [sizes.shape(source.meta.get("val")) for source in node.all_input_nodes]
    if name in _PRODUCTS:
        left = shapes[1] if name in ("aten::addmm", "aten::baddbmm") else shapes[0]
        return 2 * math.prod(sizes.shape(value)) * (left[-1] if left else 0)
    if name == "ep_fx::grouped_mm_backward":
        return 4 * math.prod(shapes[0]) * (shapes[1][-1] if len(shapes) > 1 and shapes[1] else 0)
    is_attention = "scaled_dot_product" in name or name in _ATTENTION
    if is_attention and len(shapes) > 1 and min(len(shapes[0]), len(shapes[1])) > 1:
        backward = 5 if "backward" in name else 2
        return 2 * backward * math.prod(shapes[0]) * shapes[1][-2]
    return 0
