"""Operators on MoE regions: the context of a dispatch, the trips of the rows, what experts compute with."""
from __future__ import annotations

import random
from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, find_regions, is_backward, role_of
from ep_fx.graph.regions import RegionNodes
from ep_fx.testing.mutate.base import choose, erase, operator, replace_argument

aten = torch.ops.aten
_LOGICAL_SPLITS = {Role.COMBINE: 2, Role.COMBINE_BACKWARD: 2, Role.DISPATCH_BACKWARD: 3}


def trips(graph: ParallelGraph) -> list[fx.Node]:
    """Exchanges of rows: those whose splits are values."""
    return [e for e in graph.nodes(Role.EXCHANGE) if isinstance(e.args[1], fx.Node)]


def edges(graph: ParallelGraph) -> list[tuple[fx.Node, fx.Node]]:
    """(context value, reader)."""
    sources = (*graph.nodes(Role.CONTEXT), *graph.nodes(Role.DISPATCH))
    values = [v for s in sources for v in s.users if role_of(v) is Role.GETITEM]
    return [(v, reader) for v in values for reader in v.users if v.args[1] or role_of(v.args[0]) is Role.CONTEXT]  # type: ignore[arg-type]


def field_of(source: fx.Node, index: Any) -> fx.Node | None:
    """The getitem of one field of a context."""
    return next((u for u in source.users if role_of(u) is Role.GETITEM and u.args[1] == index), None)


def other_source(graph: ParallelGraph, source: fx.Node, rng: random.Random) -> fx.Node | None:
    """Another dispatch or context of the same kind."""
    places = graph.positions()
    found = [s for s in graph.nodes(role_of(source)) if s is not source and places[s] < places[source]]
    return choose(rng, found)


@operator("swap-splits", "an exchange takes its input splits for its output splits and the other way round")
def swap_splits(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    exchange = choose(rng, trips(graph))
    if exchange is None:
        return None
    x, out, into, group = exchange.args
    exchange.args = (x, into, out, group)
    return graph


@operator("other-edge", "one context value is taken from another layer's dispatch")
def other_edge(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    case = choose(rng, edges(graph))
    if case is None:
        return None
    value, reader = case
    source = value.args[0]
    other = other_source(graph, source, rng) if isinstance(source, fx.Node) else None
    twin = field_of(other, value.args[1]) if other is not None else None
    if twin is None:
        return None
    reader.replace_input_with(value, twin)
    return graph


@operator("other-context", "a region takes its whole context from another layer's dispatch")
def other_context(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    source = choose(rng, [*graph.nodes(Role.CONTEXT), *graph.nodes(Role.DISPATCH)])
    other = other_source(graph, source, rng) if source is not None else None
    if source is None or other is None:
        return None
    fields = range(5) if role_of(source) is Role.CONTEXT else (2, 3, 4)
    for index in fields:
        value, twin = field_of(source, index), field_of(other, index)
        if value is not None and twin is not None:
            value.replace_all_uses_with(twin)
    return graph


@operator("other-backward-context", "the backward of a region takes its context from another layer's dispatch")
def other_backward_context(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    source = choose(rng, [*graph.nodes(Role.CONTEXT), *graph.nodes(Role.DISPATCH)])
    others = [s for s in graph.nodes(role_of(source)) if s is not source] if source is not None else []
    other = choose(rng, others)
    if source is None or other is None:
        return None
    changed = False
    for value in list(source.users):
        twin = field_of(other, value.args[1]) if role_of(value) is Role.GETITEM else None
        for reader in list(value.users):
            if twin is not None and is_backward(reader):
                reader.replace_input_with(value, twin)
                changed = True
    return graph if changed else None


@operator("detach-context", "a context value is replaced by constants of the same type")
def detach_context(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    tensors = [(v, r) for v, r in edges(graph) if isinstance(v.meta.get("val"), torch.Tensor)]
    case = choose(rng, tensors)
    if case is None:
        return None
    value, reader = case
    with graph.graph.inserting_before(reader):
        zeros = graph.call(aten.zeros_like.default, value, like=reader, value=value.meta["val"])
    reader.replace_input_with(value, zeros)
    return graph


@operator("constant-splits", "the splits of an exchange are numbers, as if every run routed alike")
def constant_splits(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    exchange = choose(rng, trips(graph))
    if exchange is None:
        return None
    ep = graph.manifest.mesh.size("ep")
    even = [16 // ep] * ep
    replace_argument(exchange, 1, even)
    replace_argument(exchange, 2, even)
    return graph


@operator("drop-regroup", "received rows are not put in expert order, or not taken out of it")
def drop_regroup(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.REGROUP), *graph.nodes(Role.UNGROUP)])
    if node is None:
        return None
    erase(node, node.args[0])  # type: ignore[arg-type]
    return graph


@operator("regroup-backwards", "rows are put in expert order where they are to be taken out of it, or the reverse")
def regroup_backwards(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.REGROUP), *graph.nodes(Role.UNGROUP)])
    if node is None:
        return None
    ops = torch.ops.ep_fx
    node.target = ops.ungroup.default if role_of(node) is Role.REGROUP else ops.regroup.default
    return graph


@operator("drop-padding", "rows that no expert took are not put back, or are sent though nobody counts them")
def drop_padding(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.PAD_ROWS), *graph.nodes(Role.SEND_ROWS)])
    if node is None:
        return None
    erase(node, node.args[0])  # type: ignore[arg-type]
    return graph


@operator("skip-exchange", "rows stay where they are: an all_to_all is left out")
def skip_exchange(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    exchange = choose(rng, graph.nodes(Role.EXCHANGE))
    if exchange is None:
        return None
    for wait in list(exchange.users):
        erase(wait, exchange.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(exchange)
    return graph


def _entry(graph: ParallelGraph, region: RegionNodes, rng: random.Random) -> tuple[fx.Node, fx.Node] | None:
    """What a region dispatches and what its combine gives back."""
    ends = [n for nodes in region.members.values() for n in nodes]
    if role_of(region.source) is Role.DISPATCH:
        ins = [region.source.args[0]]
        outs = [n for n in ends if role_of(n) is Role.COMBINE]
    else:
        ins = [n.args[0] for n in ends if role_of(n) is Role.SEND_ROWS and not is_backward(n)]
        outs = [n for n in ends if role_of(n) is Role.PAD_ROWS and not is_backward(n)]
    sent, back = choose(rng, ins), choose(rng, outs)
    return (sent, back) if isinstance(sent, fx.Node) and isinstance(back, fx.Node) else None


@operator("delete-region", "the experts of a layer are skipped: tokens come back as they were sent")
def delete_region(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    region = choose(rng, find_regions(graph))
    pair = _entry(graph, region, rng) if region is not None else None
    if pair is None:
        return None
    sent, back = pair
    back.replace_all_uses_with(sent)
    graph.remove_dead_code()
    return graph


@operator("erase-region", "a layer's dispatch, experts and combine are taken out of forward, with all they call")
def erase_region(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    region = choose(rng, find_regions(graph))
    pair = _entry(graph, region, rng) if region is not None else None
    if pair is None or region is None:
        return None
    sent, back = pair
    back.replace_all_uses_with(sent)
    doomed = {n for nodes in region.members.values() for n in nodes if not is_backward(n)}
    for node in reversed(list(graph)):
        if not node.users and (node in doomed or role_of(node) is Role.GETITEM):
            graph.graph.erase_node(node)
    graph.remove_dead_code()
    return graph


@operator("combine-other-rows", "the combine of a region returns the rows that it was sent, uncomputed")
def combine_other_rows(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.UNGROUP), *graph.nodes(Role.COMBINE)])
    rows = node.args[0] if node is not None else None
    if node is None or not isinstance(rows, fx.Node):
        return None
    places = graph.positions()
    shape = _shape(rows)
    others = [n for n in graph if n is not rows and _shape(n) == shape and places[n] < places[node] and shape]
    other = choose(rng, [n for n in others if n.op == "call_function"])
    if other is None:
        return None
    node.replace_input_with(rows, other)
    return graph


def _shape(node: fx.Node) -> tuple[str, ...]:
    value = node.meta.get("val")
    return (str(value.dtype), *map(str, value.shape)) if isinstance(value, torch.Tensor) else ()


@operator("counts-of-mine", "a rank takes the counts that it sent for those that it receives")
def counts_of_mine(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    context = choose(rng, graph.nodes(Role.CONTEXT))
    if context is None:
        return None
    replace_argument(context, 1, context.args[0])
    return graph


@operator("swap-counts", "the counts sent and the counts received change places")
def swap_counts(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    context = choose(rng, graph.nodes(Role.CONTEXT))
    if context is None:
        return None
    sent, received, *rest = context.args
    context.args = (received, sent, *rest)
    return graph


@operator("wrong-exchange-group", "tokens travel over another group")
def wrong_exchange_group(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    exchange = choose(rng, graph.nodes(Role.EXCHANGE))
    mesh = graph.manifest.mesh
    other = choose(rng, sorted(set(mesh.groups.values()) - {mesh.exchange_group})) if exchange is not None else None
    if exchange is None or other is None:
        return None
    replace_argument(exchange, 3, other)
    return graph


@operator("swap-unpermute-weights", "routing weights meet their rows in another order")
def swap_unpermute_weights(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    calls = [*graph.nodes(Role.UNPERMUTE), *graph.nodes(Role.UNPERMUTE_BACKWARD)]
    node = choose(rng, calls)
    weights = node.args[-1] if node is not None else None
    if node is None or not isinstance(weights, fx.Node):
        return None
    with graph.graph.inserting_before(node):
        turned = graph.call(aten.flip.default, weights, [-1], like=node, value=weights.meta.get("val"))
    node.replace_input_with(weights, turned)
    return graph
