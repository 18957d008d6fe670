"""Exchanges that go wrong: rows in another order, on other ranks, by another count, with the context of another layer.

Shapes fit wherever routing is balanced, every rank does the same, and the loss falls more slowly than it could.
"""
from __future__ import annotations

import random

from torch import fx

from ep_fx.graph import ParallelGraph, Role
from ep_fx.testing.mutate._blind import (
    BACKWARD,
    again,
    aten,
    become,
    exchanges,
    first_argument,
    has_role,
    in_order,
    lowered_regions,
    ops,
    other_groups,
    part,
    readers,
    through,
    type_of,
)
from ep_fx.testing.mutate.base import choose, erase, operator, replace_argument


@operator("blind-arrival-order", "after one exchange, or before one, rows are not put in the order that is due")
def arrival_order(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.REGROUP), *graph.nodes(Role.UNGROUP)])
    if node is None:
        return None
    become(node, aten.clone.default, first_argument(node))
    return graph


@operator("blind-order-inverted", "one exchange applies the inverse of the permutation that is due")
def order_inverted(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, [*graph.nodes(Role.REGROUP), *graph.nodes(Role.UNGROUP)])
    if node is None:
        return None
    node.target = ops.ungroup.default if has_role(node, Role.REGROUP) else ops.regroup.default
    return graph


@operator("blind-splits-swapped", "an exchange takes the rows that it sends for those that it receives")
def splits_swapped(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, exchanges(graph))
    if node is None:
        return None
    node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])
    return graph


@operator("blind-peers-guessed", "a rank takes its own counts for those that its peers sent")
def peers_guessed(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    context = choose(rng, graph.nodes(Role.CONTEXT))
    if context is None:
        return None
    replace_argument(context, 1, context.args[0])
    return graph


@operator("blind-capacity", "counts are cut to a capacity, the rows are not")
def capacity(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    context = choose(rng, graph.nodes(Role.CONTEXT))
    if context is None:
        return None
    counts = first_argument(context)
    users = [user for user in readers(counts) if has_role(user, Role.CONTEXT, Role.EXCHANGE)]
    through(graph, counts, users, aten.clamp_max.default, 2)
    return graph


@operator("blind-region-elsewhere", "a whole region exchanges over another mesh dimension of the same size")
def region_elsewhere(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    regions = [r for r in lowered_regions(graph) if other_groups(graph, graph.manifest.mesh.exchange_group)]
    region = choose(rng, regions)
    if region is None:
        return None
    group = rng.choice(other_groups(graph, graph.manifest.mesh.exchange_group))
    for node in (n for members in region.members.values() for n in members if has_role(n, Role.EXCHANGE)):
        replace_argument(node, 3, group)
    return graph


@operator("blind-rows-shifted", "each row that is sent is the one before it")
def rows_shifted(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, graph.nodes(Role.SEND_ROWS))
    if node is None:
        return None
    through(graph, first_argument(node), [node], aten.roll.default, [1], [0])
    return graph


@operator("blind-rows-of-other-layer", "a layer sends the rows that another layer sent before")
def rows_of_other_layer(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    sends = graph.nodes(Role.SEND_ROWS)
    pairs = [
        (b, first_argument(a)) for i, b in enumerate(sends) for a in sends[:i]
        if type_of(first_argument(a)) == type_of(first_argument(b)) and a.args[0] is not b.args[0]
    ]
    if not pairs:
        return None
    node, rows = rng.choice(pairs)
    replace_argument(node, 0, rows)
    return graph


@operator("blind-context-of-other-layer", "one exchange takes its whole context from another layer")
def context_of_other_layer(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    regions, places = lowered_regions(graph), graph.positions()
    own = {node: region for region in regions for members in region.members.values() for node in members}
    moves = [node for node in exchanges(graph) if node in own]
    pairs = [(n, r) for n in moves for r in regions if r is not own[n] and places[r.source] < places[n]]
    if not pairs:
        return None
    node, other = rng.choice(pairs)
    wait = next(iter(node.users))
    for index in range(4):
        mine, foreign = part(own[node].source, index), part(other.source, index)
        for member in (first_argument(node), node, wait, *wait.users):
            if mine is not None and foreign is not None and mine in member.all_input_nodes:
                member.replace_input_with(mine, foreign)
    return graph


@operator("blind-permutation-of-other-layer", "one reordering of rows takes its permutation from another layer")
def permutation_of_other_layer(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    places = graph.positions()
    indices = [i for region in lowered_regions(graph) if (i := part(region.source, 0))]
    nodes = [*graph.nodes(Role.REGROUP), *graph.nodes(Role.UNGROUP)]
    pairs = [(n, i) for n in nodes for i in indices if i is not n.args[1] and places[i] < places[n]]
    if not pairs:
        return None
    node, permutation = rng.choice(pairs)
    replace_argument(node, 1, permutation)
    return graph


@operator("blind-context-again", "backward counts anew and makes a context of its own")
def context_again(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    region = choose(rng, lowered_regions(graph))
    if region is None:
        return None
    edges = [edge for index in range(5) if (edge := part(region.source, index))]
    users = in_order(graph, [user for edge in edges for user in readers(edge, BACKWARD)])
    wait = region.source.args[1]
    if not users or not isinstance(wait, fx.Node) or not isinstance(wait.args[0], fx.Node):
        return None
    copies = again(graph, [wait.args[0], wait, region.source, *edges], users[0])
    for edge in edges:
        for user in readers(edge, BACKWARD):
            user.replace_input_with(edge, copies[edge])
    return graph


@operator("blind-padding-forgotten", "rows that were not sent do not come back as zeros: they do not come back")
def padding_forgotten(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    pad = choose(rng, graph.nodes(Role.PAD_ROWS))
    if pad is None:
        return None
    erase(pad, first_argument(pad))
    return graph
