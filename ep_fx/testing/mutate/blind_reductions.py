"""Sums over ranks that are wrong and look right: another divisor, other ranks, twice, not at all, another order.

Adam hides a constant factor altogether, and what one rank leaves out nobody misses in a falling loss.
"""
from __future__ import annotations

import random
from typing import cast

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role
from ep_fx.testing.mutate._blind import (
    BACKWARD,
    aten,
    elements,
    first_argument,
    has_role,
    in_order,
    ops,
    other_groups,
    put,
    readers,
    set_element,
    truncated,
    twins,
    type_of,
)
from ep_fx.testing.mutate.base import choose, operator, replace_argument, set_gradient

_STARTS = (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD)


def _contributions(graph: ParallelGraph) -> list[tuple[fx.Node, int]]:
    """Each gradient as this rank computed it: a node that reads a list, and a place in the list."""
    nodes = [*graph.nodes(Role.REDUCE_GRAD), *graph.nodes(Role.ALL_REDUCE_GRAD)]
    return [(node, index) for node in nodes for index in range(len(elements(node)))]


def _ranks_of(graph: ParallelGraph, scale: fx.Node) -> int | None:
    """Over how many ranks the last sum before a division went."""
    wait = scale.args[0]
    start = wait.args[0] if has_role(wait, Role.REDUCE_GRAD_WAIT) and isinstance(wait, fx.Node) else None
    if not isinstance(start, fx.Node) or not has_role(start, *_STARTS):
        return None
    mesh = graph.manifest.mesh
    return mesh.size(*(mesh.dims_of(str(start.args[-1])) or ()))


@operator("blind-divisor-of-group", "gradients are divided by the size of the group that was reduced over last")
def divisor_of_group(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    sizes = [(scale, size) for scale in graph.nodes(Role.SCALE_GRAD) if (size := _ranks_of(graph, scale))]
    found = choose(rng, [(scale, size) for scale, size in sizes if size != scale.args[1]])
    if found is None:
        return None
    replace_argument(found[0], 1, float(found[1]))
    return graph


@operator("blind-averaged-before", "one gradient is averaged before it is summed, and divided again afterwards")
def averaged_before(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = choose(rng, _contributions(graph))
    if found is None:
        return None
    node, index = found
    gradient = elements(node)[index]
    factor = 1.0 / rng.choice([2, graph.manifest.mesh.data_ranks])
    set_element(node, index, put(graph, node, aten.mul.Scalar, gradient, factor, like=gradient))
    return graph


@operator("blind-sum-elsewhere", "gradients are summed over another mesh dimension of the same size")
def sum_elsewhere(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    nodes = [n for role in _STARTS for n in graph.nodes(role) if other_groups(graph, str(n.args[-1]))]
    node = choose(rng, nodes)
    if node is None:
        return None
    replace_argument(node, len(node.args) - 1, rng.choice(other_groups(graph, str(node.args[-1]))))
    return graph


@operator("blind-summed-over-ep-too", "a hook sums gradients over the ranks of ep once more")
def summed_over_ep_too(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    group = graph.manifest.mesh.groups.get(("ep",))
    scale = choose(rng, [n for n in graph.nodes(Role.SCALE_GRAD) if isinstance(n.args[0], fx.Node)])
    if group is None or scale is None:
        return None
    ready = first_argument(scale)
    started = put(graph, scale, ops.all_reduce_grad.default, ready, group, like=ready)
    replace_argument(scale, 0, put(graph, scale, ops.reduce_grad_wait.default, started, like=ready))
    return graph


@operator("blind-sum-discarded", "a reduction runs and its result is dropped: what went into it is used")
def sum_discarded(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found: list[tuple[fx.Node, fx.Node]] = []
    for start, wait in ((n, w) for role in _STARTS for n in graph.nodes(role) for w in readers(n)):
        if isinstance(start.args[0], fx.Node):
            found.append((wait, first_argument(start)))
        for scale in (u for u in readers(wait) if elements(start) and has_role(u, Role.SCALE_GRAD)):
            found += [(item, elements(start)[cast(int, item.args[1])]) for item in readers(scale)]
    if not found:
        return None
    node, local = rng.choice(found)
    if has_role(node, Role.GETITEM):
        size = node.meta["val"].shape[0]
        local = put(graph, node.next, aten.slice.Tensor, local, 0, 0, size, like=node)
    node.replace_all_uses_with(local)
    return graph


@operator("blind-summed-in-bf16", "a gradient is rounded to bf16 before it is summed over ranks")
def summed_in_bf16(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = choose(rng, _contributions(graph))
    if found is None:
        return None
    node, index = found
    truncated(graph, elements(node)[index], [node], torch.bfloat16)
    return graph


@operator("blind-gradients-swapped", "two parameters of one shape get each other's gradient")
def gradients_swapped(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    nodes = [g for g in graph.gradients.values() if isinstance(g, fx.Node)]
    pairs = [(a, b) for a in nodes for b in twins(nodes, a)]
    if not pairs:
        return None
    names = {node: name for name, node in graph.gradients.items()}
    one, other = rng.choice(pairs)
    set_gradient(graph, names[one], other)
    set_gradient(graph, names[other], rng.choice([one, other]))
    return graph


@operator("blind-rank-absent", "rank 0 contributes zeros to the gradient of one parameter", ranks=(0,))
def rank_absent(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = choose(rng, _contributions(graph))
    if found is None:
        return None
    node, index = found
    gradient = elements(node)[index]
    set_element(node, index, put(graph, node, aten.zeros_like.default, gradient, like=gradient))
    return graph


@operator("blind-rank-lists-otherwise", "rank 0 swaps two shards or gradients of one shape in its list", ranks=(0,))
def rank_lists_otherwise(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    lists = [*graph.nodes(Role.REDUCE_GRAD), *graph.nodes(Role.UNSHARD)]
    pairs = [
        (node, i, j) for node in lists for i, a in enumerate(elements(node))
        for j, b in enumerate(elements(node)) if i < j and type_of(a) == type_of(b)
    ]
    if not pairs:
        return None
    node, i, j = rng.choice(pairs)
    first, second = elements(node)[i], elements(node)[j]
    set_element(node, i, second)
    set_element(node, j, first)
    return graph


@operator("blind-rank-reduces-late", "rank 0 starts a reduction after the next collective of its group", ranks=(0,))
def rank_reduces_late(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    starts = [*graph.nodes(Role.REDUCE_GRAD), *graph.nodes(Role.UNSHARD, BACKWARD)]
    ordered = in_order(graph, starts)
    pairs = [
        (a, b) for i, a in enumerate(ordered) if has_role(a, Role.REDUCE_GRAD)
        for b in [next((n for n in ordered[i + 1 :] if n.args[-1] == a.args[-1]), None)] if b is not None
    ]
    if not pairs:
        return None
    early, late = rng.choice(pairs)
    late.append(early)
    return graph
