"""Rule `pair`: dispatch, combine and their backwards of one run of a region belong together, and to nobody else.

    context       permuted_indices, splits, number of rows: all from one dispatch of the node's own region
    direction     rows go out with (output, input) splits and come back with (input, output)
    flow          what is combined was dispatched with that context; what computes in between uses that region's
                  weights and token counts

Holds for logical nodes and for lowered exchanges. O(nodes).
"""
from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from ep_fx.graph import Role, role_of
from ep_fx.verify.facts import Facts
from ep_fx.verify.reading import arg, names
from ep_fx.verify.regions import (
    FIELDS,
    LOGICAL_CONTEXT,
    LOGICAL_FIELDS,
    TOKENS,
    Region,
    Trip,
    bits,
    context_values,
    count_exchange,
    flow,
    origin,
)
from ep_fx.verify.rule import Violation, rule

_ONE_CONTEXT = "take permuted_indices, splits and number of rows from the one dispatch whose rows these are"


@rule("pair", "each combine and each backward node takes all its context from one dispatch of its own region")
def pair(facts: Facts) -> Iterator[Violation]:
    for region in facts.regions.all:
        yield from _dispatch(facts, region)
        yield from _once_each(facts, region)
        for call in region.calls:
            facts.checked += 1
            yield from _call(region, call)
    for stray in facts.regions.strays:
        yield Violation(stray, "the context of a dispatch", names(stray.all_input_nodes), _ONE_CONTEXT)
    for trip in facts.regions.trips:
        facts.checked += len(trip.edges)
        yield from _trip(facts, trip)
    masks = flow(facts)
    yield from _flow(facts, masks)
    yield from _experts(facts, masks)
    yield from _foreign_context(facts, masks, context_values(facts, masks))


# -- dispatch ------------------------------------------------------------------------------------------------------
def _dispatch(facts: Facts, region: Region) -> Iterator[Violation]:
    facts.checked += 1
    node, ep = region.dispatch, facts.manifest.mesh.size("ep")
    if region.spec is not None and region.spec.ep_size is not None:
        ep = region.spec.ep_size
    if region.spec is None:
        known = sorted(r.name for r in facts.manifest.regions)
        yield Violation(node, f"a region of the Manifest: {known}", repr(region.name), "keep the region's name")
    if arg(node, 3) != ep:
        remedy = "dispatch over the ranks that share its experts"
        yield Violation(node, f"ep_size {ep}, the region's", repr(arg(node, 3)), remedy)
    if not region.lowered:
        return
    counts = count_exchange(node)
    if counts is None or arg(counts, 0) is not arg(node, 0):
        yield Violation(
            at=node,
            expected=f"as second argument the exchanged counts of %{_name(arg(node, 0))}",
            got=f"%{_name(arg(node, 1))}",
            remedy="exchange tokens_per_expert over the ep group, wait, and hand both to dispatch_context",
        )
    elif region.spec is not None:
        each = [region.spec.num_experts // ep] * ep
        wanted = (each, each, _group(facts))
        got = (_listed(arg(counts, 1)), _listed(arg(counts, 2)), arg(counts, 3))
        if got != wanted:
            yield Violation(counts, f"splits and group {wanted}", f"{got}", "send each rank its experts' counts")
    rows = {trip.rows for trip in region.sends if not facts.is_backward(trip.exchange)}
    if rows and not any(_is_length_of(arg(node, 2), row) for row in rows):
        yield _wrong_length(node, arg(node, 2), next(iter(rows)))


def _once_each(facts: Facts, region: Region) -> Iterator[Violation]:
    """One combine of one dispatch; a second backward would add its gradient twice."""
    combines, lowered = region.combine_ends, region.lowered
    if len(combines) > 1:
        yield Violation(combines[1], f"one combine for %{region.dispatch.name}", names(combines), _ONE_CONTEXT)
    sent = [t.rows for t in region.sends if not facts.is_backward(t.exchange)]
    ways = len(sent) if lowered else 1
    if lowered and (not sent or len(set(sent)) != len(sent) or len(sent) > 2):
        yield Violation(
            at=region.dispatch,
            expected="rows (and their weights, where there are any) dispatched once each with this context",
            got=f"{len(sent)} exchanges send {names(s for s in sent if isinstance(s, fx.Node))}",
            remedy="one exchange for the rows, one for the weights",
        )
    starts, ends = region.combine_backward_starts, region.dispatch_backward_ends
    for what, found, most in (("combine_backward", starts, 1), ("dispatch_backward", ends, ways)):
        if len(found) > most:
            yield Violation(found[most], f"one {what} for %{region.dispatch.name}", names(found), _ONE_CONTEXT)


# -- logical nodes -------------------------------------------------------------------------------------------------
def _call(region: Region, node: fx.Node) -> Iterator[Violation]:
    first = LOGICAL_CONTEXT[role_of(node)]
    for place, field in ((first, 3), (first + 1, 4)):
        edge = origin(arg(node, place))
        if edge != (region.dispatch, field):
            yield Violation(
                at=node,
                expected=f"{LOGICAL_FIELDS[field]} of %{region.dispatch.name} as argument {place}",
                got=_edge_text(arg(node, place)),
                remedy=_ONE_CONTEXT,
            )
    if arg(node, len(node.target._schema.arguments) - 1) != region.name:  # type: ignore[union-attr]
        yield Violation(node, f"region {region.name!r}, its dispatch's", f"{node.args[-1]!r}", "keep the region's name")
    if role_of(node) is not Role.COMBINE_BACKWARD:
        rows = arg(region.dispatch, 0)
        if not _is_length_of(arg(node, first + 2), rows):
            yield _wrong_length(node, arg(node, first + 2), rows)


def _wrong_length(node: fx.Node, got: Any, rows: Any) -> Violation:
    return Violation(
        at=node,
        expected=f"the number of rows of %{_name(rows)}, which was dispatched",
        got=f"%{got.name}" if isinstance(got, fx.Node) else repr(got),
        remedy=_ONE_CONTEXT,
    )


def _is_length_of(size: Any, rows: Any) -> bool:
    """Whether `size` is the length of `rows` along dim 0: the same expression, or read off the rows themselves."""
    if not isinstance(rows, fx.Node):
        return False
    value = rows.meta.get("val")
    length = value.shape[0] if isinstance(value, torch.Tensor) else None
    if not isinstance(size, fx.Node):
        return length is not None and _same_size(size, length)
    if size.target is torch.ops.aten.sym_size.int and size.args[0] is rows and size.args[1] == 0:
        return True
    return length is not None and _same_size(size.meta.get("val"), length)


def _same_size(a: Any, b: Any) -> bool:
    left = a.node.expr if isinstance(a, torch.SymInt) else a
    right = b.node.expr if isinstance(b, torch.SymInt) else b
    return left is not None and bool(left == right)


# -- lowered exchanges ---------------------------------------------------------------------------------------------
def _trip(facts: Facts, trip: Trip) -> Iterator[Violation]:
    if arg(trip.exchange, 3) != _group(facts):
        got = f"{arg(trip.exchange, 3)!r}"
        yield Violation(trip.exchange, f"an exchange over group {_group(facts)!r}", got, "use the group of exchanges")
    if trip.kind == "?" or trip.after is None or _ENDS[trip.kind] is not role_of(trip.after):
        yield Violation(
            at=trip.exchange,
            expected="send_rows before and regroup after it, or ungroup before and pad_rows after it",
            got=f"%{trip.before.name if trip.before else _name(arg(trip.exchange, 0))} before, %{trip.end.name} after",
            remedy="keep the halves of an exchange together",
        )
    owner = trip.region
    for place, value, field in trip.edges:
        edge = origin(value)
        if owner is None or edge != (owner.dispatch, field):
            yield Violation(
                at=trip.exchange,
                expected=f"{FIELDS[field]} of %{owner.dispatch.name if owner else 'dispatch_context'} as {place}",
                got=_edge_text(value),
                remedy=_ONE_CONTEXT + "; on the way back the splits are swapped",
            )


def _group(facts: Facts) -> str | None:
    """The group that tokens travel over: one of their own, or that of ``ep``."""
    mesh = facts.manifest.mesh
    return mesh.exchange or mesh.groups.get(("ep",))


_ENDS = {"send": Role.REGROUP, "return": Role.PAD_ROWS}


# -- flow ----------------------------------------------------------------------------------------------------------
def _flow(facts: Facts, masks: Sequence[int]) -> Iterator[Violation]:
    regions = facts.regions.all
    for index, region in enumerate(regions):
        for backward in (False, True):
            for rows in _coming_back(facts, region, backward):
                facts.checked += 1
                constant = backward and isinstance(rows, fx.Node) and not facts.is_gradient(rows)
                mask = masks[facts.position[rows]] if isinstance(rows, fx.Node) and rows in facts.position else 0
                if isinstance(rows, fx.Node) and not constant and not mask & 1 << index:
                    yield _others_rows(region, rows, backward, [r for i, r in enumerate(regions) if mask & 1 << i])


def _others_rows(region: Region, rows: fx.Node, backward: bool, owners: Sequence[Region]) -> Violation:
    back, out = ("dispatch_backward", "combine_backward") if backward else ("combine", "dispatch")
    return Violation(
        at=rows,
        expected=f"{back} with the context of %{region.dispatch.name} on rows of its own {out}",
        got=f"rows of {', '.join(f'%{owner.dispatch.name}' for owner in owners) or f'no {out}'}",
        remedy=_ONE_CONTEXT,
    )


def _experts(facts: Facts, masks: Sequence[int]) -> Iterator[Violation]:
    """What computes on rows: with weights, or by counts."""
    kinds, pure = facts.table.kinds, facts.parameters_in
    for index, inputs in enumerate(facts.table.inputs):
        if not masks[index]:
            continue
        counts_at = _COUNTS_AT.get(kinds[index].role)
        if counts_at is not None or any(pure[source] is not None for source in inputs):
            yield from _inside(facts, index, masks, counts_at)


def _coming_back(facts: Facts, region: Region, backward: bool) -> list[Any]:
    """What leaves the experts of `region`: the rows that its combine (dispatch_backward) gets."""
    if region.lowered:
        return [t.rows for t in region.returns if facts.is_backward(t.exchange) is backward]
    role = Role.DISPATCH_BACKWARD if backward else Role.COMBINE
    return [arg(call, 0) for call in region.calls if role_of(call) is role]


def _inside(facts: Facts, index: int, masks: Sequence[int], counts_at: int | None) -> Iterator[Violation]:
    """Experts compute with the weights and the counts of the region whose rows they got."""
    node, inputs, weights = facts.nodes[index], facts.table.inputs[index], dict[str, Any]()
    if node is facts.output:
        return
    for source in inputs:
        weights |= facts.parameters_in[source] or {}
    experts = facts.experts.intersection(weights)
    if counts_at is None and not experts:
        return
    regions = [facts.regions.all[i] for i in bits(_union(masks, inputs, _half(facts, index)))]
    facts.checked += 1
    if regions and not any(_has_weights(r, experts, weights, counts_at) for r in regions):
        allowed = sorted({name for r in regions if r.spec for name in r.spec.parameters})
        yield Violation(
            at=node,
            expected=f"weights of region {', '.join(sorted({r.name for r in regions}))}: {allowed}",
            got=f"{sorted(weights) or 'no parameter'}",
            remedy="compute each region with its own experts",
        )
    if counts_at is not None and regions:
        edge = _counts_origin(arg(node, counts_at))
        if edge is None or not any(edge == (r.dispatch, TOKENS if r.lowered else 2) for r in regions):
            yield Violation(
                at=node,
                expected=f"tokens_per_expert of {', '.join(f'%{r.dispatch.name}' for r in regions)}",
                got=_edge_text(arg(node, counts_at)),
                remedy="take the counts from the dispatch that brought the rows",
            )


def _half(facts: Facts, index: int) -> int:
    """Where the half begins in which a position lies."""
    return facts.backward_start if index >= facts.backward_start else 0


def _union(masks: Sequence[int], sources: Sequence[int], start: int) -> int:
    return reduce(operator.or_, (masks[source] for source in sources if source >= start), 0)


def _foreign_context(facts: Facts, masks: Sequence[int], context: Sequence[int]) -> Iterator[Violation]:
    """What computes on the rows of one run reads no counts, indices or splits of another."""
    regions = facts.regions.all
    for index, inputs in enumerate(facts.table.inputs):
        if not masks[index]:
            continue
        for source in inputs:
            foreign = context[source] & ~masks[index]
            if foreign:
                of_both = (masks[index], foreign)
                own, other = ([f"%{r.dispatch.name}" for i, r in enumerate(regions) if m & 1 << i] for m in of_both)
                yield Violation(
                    at=facts.nodes[index],
                    expected=f"values of the context of {', '.join(own)}, whose rows these are",
                    got=f"%{facts.nodes[source].name} is computed from the context of {', '.join(other)}",
                    remedy="take the counts from the dispatch that brought the rows",
                )


_COUNTS_AT = {Role.GROUPED_MM: 2, Role.GROUPED_MM_BACKWARD: 3, Role.ADD_BIAS: 2, Role.ADD_BIAS_BACKWARD: 1}


def _has_weights(region: Region, experts: frozenset[str], weights: dict[str, Any], counts_at: int | None) -> bool:
    own = set(region.spec.parameters) if region.spec is not None else set()
    return own >= (set(weights) if counts_at is not None else experts)


def _counts_origin(value: Any) -> tuple[fx.Node, int] | None:
    """The context value behind counts, through casts and views."""
    while isinstance(value, fx.Node) and origin(value) is None and len(value.all_input_nodes) == 1:
        value = value.all_input_nodes[0]
    return origin(value)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _name(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


def _edge_text(value: Any) -> str:
    edge = origin(value)
    if edge is None:
        return f"%{value.name}" if isinstance(value, fx.Node) else repr(value)
    fields = FIELDS if role_of(edge[0]) is Role.CONTEXT else LOGICAL_FIELDS
    field = fields[edge[1]] if 0 <= edge[1] < len(fields) else str(edge[1])
    return f"{field} of %{edge[0].name}"
