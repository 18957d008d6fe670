"""Each run of each MoE region, read from its context edges: logical nodes and lowered exchanges look alike here.

    send     send_rows -> all_to_all -> wait -> regroup     dispatch (forward), combine_backward (backward)
    return   ungroup   -> all_to_all -> wait -> pad_rows    combine (forward), dispatch_backward (backward)

A trip belongs to the dispatch whose splits its all_to_all takes. Two walks, O(nodes).
"""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ep_fx.graph import RegionSpec, Role, role_of
from ep_fx.verify.reading import arg

if TYPE_CHECKING:
    from ep_fx.verify.facts import Facts

aten = torch.ops.aten
INDICES, INPUT_SPLITS, OUTPUT_SPLITS, INPUT_SHAPE, TOKENS = range(5)
"""Fields of a lowered context."""
FIELDS = ("permuted_indices", "input_splits", "output_splits", "input_shape", "tokens_per_expert")
LOGICAL_FIELDS = ("routed_input", "routed_weights", "tokens_per_expert", "permuted_indices", "splits")
_SAME_VALUE = frozenset(map(id, (aten.detach.default, aten.alias.default, aten.clone.default)))
"""By identity, since the hash of an operator is a call."""

Edge = tuple[fx.Node, int]
"""A context value: the dispatch (or dispatch_context) that made it, and which field it is."""


@dataclass(eq=False)
class Trip:
    """One all_to_all of rows.

    Args:
        exchange: the collective.
        kind: ``"send"``, ``"return"``, or ``"?"`` where what precedes it is neither.
        before, after: `send_rows` and `regroup`, or `ungroup` and `pad_rows`; None where missing.
        edges: the context values it takes: name of the place, what stands there, the field that belongs there.
        region: whose context most of these are, None where there is none among them.
    """

    exchange: fx.Node
    kind: str
    before: fx.Node | None
    after: fx.Node | None
    edges: list[tuple[str, Any, int]]
    region: Region | None = None

    @property
    def end(self) -> fx.Node:
        """Where its result is."""
        return self.after or self.exchange

    @property
    def rows(self) -> Any:
        """What is sent."""
        return arg(self.before, 0) if self.before is not None else arg(self.exchange, 0)


@dataclass(eq=False)
class Region:
    """One run of a region.

    Args:
        name: as its dispatch says.
        dispatch: the `dispatch` or `dispatch_context` node.
        spec: the Manifest's record of that name, None where it has none.
        first: first node of the dispatch that communicates.
        sends, returns: lowered trips, forward and backward.
        calls: logical nodes that take its context.
    """

    name: str
    dispatch: fx.Node
    spec: RegionSpec | None
    lowered: bool
    first: fx.Node
    sends: list[Trip] = field(default_factory=list)
    returns: list[Trip] = field(default_factory=list)
    calls: list[fx.Node] = field(default_factory=list)
    dispatch_ends: list[fx.Node] = field(default_factory=list)
    combine_ends: list[fx.Node] = field(default_factory=list)
    combine_backward_starts: list[fx.Node] = field(default_factory=list)
    combine_backward_ends: list[fx.Node] = field(default_factory=list)
    dispatch_backward_ends: list[fx.Node] = field(default_factory=list)


class Regions:
    """All runs of all regions, and the trips that belong to none.

    Args:
        facts: of the graph.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        specs = {r.name: r for r in facts.manifest.regions}
        self.all: list[Region] = []
        self._of: dict[fx.Node, Region] = {}
        for node in (*facts.by_role[Role.DISPATCH], *facts.by_role[Role.CONTEXT]):
            name = str(node.args[-1]) if node.args else ""
            lowered = role_of(node) is Role.CONTEXT
            region = Region(name, node, specs.get(name), lowered, count_exchange(node) or node)
            self.all.append(region)
            self._of[node] = region
        self.all.sort(key=lambda r: facts.position[r.dispatch])
        self.strays: list[fx.Node] = []
        """Logical nodes whose context is no dispatch's."""
        self._collect_calls()
        self.trips = [t for e in facts.by_role[Role.EXCHANGE] if (t := self._trip(e)) is not None]
        for trip in self.trips:
            self._enter(trip)

    def owner(self, edge: Any) -> Region | None:
        """The region whose context a value is."""
        found = origin(edge)
        return self._of.get(found[0]) if found is not None else None

    def _collect_calls(self) -> None:
        by_role = self._facts.by_role
        for region in self.all:
            if not region.lowered:
                region.dispatch_ends.append(region.dispatch)
        for role, position in LOGICAL_CONTEXT.items():
            for node in by_role[role]:
                region_ = self.owner(arg(node, position + 1)) or self.owner(arg(node, position))
                if region_ is None:
                    self.strays.append(node)
                    continue
                region_.calls.append(node)
                if role is Role.COMBINE:
                    region_.combine_ends.append(node)
                elif role is Role.DISPATCH_BACKWARD:
                    region_.dispatch_backward_ends.append(node)
                else:
                    region_.combine_backward_starts.append(node)
                    region_.combine_backward_ends.append(node)

    def _trip(self, exchange: fx.Node) -> Trip | None:
        """The trip of an exchange that takes a context or has a neighbour of the dialect; None for others."""
        source = arg(exchange, 0)
        before = source if isinstance(source, fx.Node) else None
        kind = _KINDS.get(role_of(before), "?") if before is not None else "?"
        after = _after(exchange)
        if kind == "?":
            before = None
            if after is None and self.owner(arg(exchange, 1)) is None and self.owner(arg(exchange, 2)) is None:
                return None
        out, into = (INPUT_SPLITS, OUTPUT_SPLITS) if kind == "return" else (OUTPUT_SPLITS, INPUT_SPLITS)
        edges = [("output splits", arg(exchange, 1), out), ("input splits", arg(exchange, 2), into)]
        for name, node, fields in (("rows sent", before, _BEFORE), ("rows received", after, _AFTER)):
            if node is not None:
                edges.append((name, arg(node, 1), fields[role_of(node)]))
        return Trip(exchange, kind, before, after, edges)

    def _enter(self, trip: Trip) -> None:
        owners = Counter(r for _, value, _ in trip.edges if (r := self.owner(value)) is not None)
        if not owners:
            return
        region = trip.region = owners.most_common(1)[0][0]
        backward = self._facts.is_backward(trip.exchange)
        if trip.kind == "return":
            region.returns.append(trip)
            (region.dispatch_backward_ends if backward else region.combine_ends).append(trip.end)
        elif backward:
            region.sends.append(trip)
            region.combine_backward_starts.append(trip.before or trip.exchange)
            region.combine_backward_ends.append(trip.end)
        else:
            region.sends.append(trip)
            region.dispatch_ends.append(trip.end)


_KINDS = {Role.SEND_ROWS: "send", Role.UNGROUP: "return"}
_BEFORE = {Role.SEND_ROWS: INPUT_SPLITS, Role.UNGROUP: INDICES}
_AFTER = {Role.REGROUP: INDICES, Role.PAD_ROWS: INPUT_SHAPE}
LOGICAL_CONTEXT = {Role.COMBINE: 1, Role.COMBINE_BACKWARD: 1, Role.DISPATCH_BACKWARD: 2}
"""Where logical nodes take permuted_indices; splits come next, then num_rows (where taken)."""


def origin(value: Any) -> Edge | None:
    """The context value that a node is, seen through nodes that do not change it."""
    while isinstance(value, fx.Node) and id(value.target) in _SAME_VALUE:
        value = value.args[0]
    if not isinstance(value, fx.Node) or role_of(value) is not Role.GETITEM:
        return None
    source, index = value.args
    if isinstance(source, fx.Node) and role_of(source) in (Role.DISPATCH, Role.CONTEXT) and isinstance(index, int):
        return source, index
    return None


def count_exchange(context: fx.Node) -> fx.Node | None:
    """The all_to_all that told a `dispatch_context` what it receives."""
    wait = arg(context, 1) if role_of(context) is Role.CONTEXT else None
    start = arg(wait, 0) if isinstance(wait, fx.Node) and role_of(wait) is Role.WAIT else None
    return start if isinstance(start, fx.Node) and role_of(start) is Role.EXCHANGE else None


def _after(exchange: fx.Node) -> fx.Node | None:
    for done in exchange.users:
        if role_of(done) is Role.WAIT:
            return next((user for user in done.users if role_of(user) in _AFTER), None)
    return None


def flow(facts: Facts) -> list[int]:
    """By position: a bit for each region whose routed rows (or their gradients) a node is computed from.

    Bit i stands for region i, from the end of its dispatch (combine_backward) to the end of its combine
    (dispatch_backward), where the rows leave the experts. Rows that forward saves for backward do not flow on there.
    """
    table = facts.table
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for index, region in enumerate(facts.regions.all):
        for node in (*region.dispatch_ends, *region.combine_backward_ends):
            starts[table.position[node]] = starts.get(table.position[node], 0) | 1 << index
        for node in (*region.combine_ends, *region.dispatch_backward_ends):
            ends[table.position[node]] = ends.get(table.position[node], 0) | 1 << index
    masks = [0] * len(table)
    if not starts:
        return masks
    for half in (range(facts.backward_start), range(facts.backward_start, len(table))):
        for index in half:
            mask = starts.get(index, 0)
            for source in table.inputs[index]:
                if masks[source] and source >= half.start:
                    mask |= masks[source]
            if mask:
                mask &= ~ends.get(index, 0)
                masks[index] = 0 if mask and _is_count(table.nodes[index]) else mask
    return masks


def bits(mask: int) -> Iterator[int]:
    """The places of the ones in `mask`."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def context_values(facts: Facts, masks: Sequence[int]) -> list[int]:
    """By position: a bit for each region from whose context, with constants, a value is computed; running sums of
    counts, for one.

    Args:
        masks: what `flow` gives: what rows flow through gives no context value.
    """
    table, pure = facts.table, facts.parameters_in
    found = [0] * len(table)
    for index, region in enumerate(facts.regions.all):
        for node in region.dispatch.users:
            place = table.position.get(node)
            if place is None or node.target is not operator.getitem or masks[place]:
                continue
            if role_of(region.dispatch) is Role.CONTEXT or _is_count(node):
                found[place] = 1 << index
    for index, inputs in enumerate(table.inputs):
        for source in inputs:
            if found[source]:
                break
        else:
            continue
        if not masks[index] and all(found[source] or pure[source] is not None for source in inputs):
            for source in inputs:
                found[index] |= found[source]
    return found


def _is_count(node: fx.Node) -> bool:
    """Context values of a logical dispatch are no rows."""
    if role_of(node) is not Role.GETITEM and id(node.target) not in _SAME_VALUE:
        return False
    edge = origin(node)
    return edge is not None and role_of(edge[0]) is Role.DISPATCH and edge[1] > 1
