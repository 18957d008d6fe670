"""Operators on gradients: over which ranks they are summed, how often, and by what they are divided."""
from __future__ import annotations

import operator as python
import random
from collections.abc import Sequence

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, is_backward, role_of
from ep_fx.testing.mutate.base import choose, erase, operator, replace_argument, set_gradient

aten, ops = torch.ops.aten, torch.ops.ep_fx
_LISTS = (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.REDUCE_GRAD_WAIT, Role.SCALE_GRAD)


def gradient(graph: ParallelGraph, rng: random.Random) -> tuple[str, fx.Node] | None:
    """The name of a trainable parameter and what is returned as its gradient."""
    return choose(rng, [(n, g) for n, g in sorted(graph.gradients.items()) if isinstance(g, fx.Node)])


def entries(graph: ParallelGraph) -> list[fx.Node]:
    """Local gradients: what reductions take."""
    starts = (*graph.nodes(Role.REDUCE_GRAD), *graph.nodes(Role.ALL_REDUCE_GRAD))
    return [n for start in starts for n in start.all_input_nodes if role_of(n) not in _LISTS]


@operator("drop-divisor", "the gradients of a unit are not divided")
def drop_divisor(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    scale = choose(rng, [s for s in graph.nodes(Role.SCALE_GRAD) if isinstance(s.args[0], fx.Node)])
    if scale is None:
        return None
    erase(scale, scale.args[0])  # type: ignore[arg-type]
    return graph


@operator("scale-twice", "the gradients of a unit are divided twice")
def scale_twice(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    scale = choose(rng, graph.nodes(Role.SCALE_GRAD))
    if scale is None:
        return None
    users = list(scale.users)
    with graph.graph.inserting_after(scale):
        again = graph.call(ops.scale_grad.default, scale, scale.args[1], like=scale, value=scale.meta.get("val"))
    for user in users:
        user.replace_input_with(scale, again)
    return graph


@operator("divide-by-group", "gradients are divided by the size of the group that they were reduced over")
def divide_by_group(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    mesh = graph.manifest.mesh
    cases = []
    for scale in graph.nodes(Role.SCALE_GRAD):
        node, size = scale.args[0], 1
        while isinstance(node, fx.Node):
            if role_of(node) in (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD):
                size *= mesh.size(*(mesh.dims_of(str(node.args[-1])) or ()))
            node = node.args[0] if node.args else None
        if float(size) != scale.args[1]:
            cases.append((scale, float(size)))
    case = choose(rng, cases)
    if case is None:
        return None
    replace_argument(case[0], 1, case[1])
    return graph


@operator("wrong-divisor", "the divisor is another number")
def wrong_divisor(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    scale = choose(rng, graph.nodes(Role.SCALE_GRAD))
    if scale is None:
        return None
    replace_argument(scale, 1, float(scale.args[1]) * rng.choice((0.5, 2.0, 1.01, -1.0)))  # type: ignore[arg-type]
    return graph


@operator("scale-gradient", "a gradient is scaled by a plain multiplication before it is reduced")
def scale_gradient(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    entry = choose(rng, entries(graph))
    if entry is None:
        return None
    users = list(entry.users)
    with graph.graph.inserting_after(entry):
        factor = rng.choice((0.5, 2.0))
        scaled = graph.call(aten.mul.Tensor, entry, factor, like=entry, value=entry.meta.get("val"))
    for user in users:
        user.replace_input_with(entry, scaled)
    return graph


@operator("reduce-too-many", "a gradient is summed over a mesh dimension on which its contributions are the same sum")
def reduce_too_many(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = gradient(graph, rng)
    group = choose(rng, sorted(graph.manifest.mesh.groups.values()))
    if found is None or group is None:
        return None
    name, value = found
    with graph.graph.inserting_before(graph.output):
        set_gradient(graph, name, _all_reduce(graph, value, group))
    return graph


def _all_reduce(graph: ParallelGraph, value: fx.Node, group: str) -> fx.Node:
    values = [value.meta.get("val")]
    started = graph.call(ops.all_reduce_grad.default, [value], group, like=value, value=values)
    done = graph.call(ops.reduce_grad_wait.default, started, like=value, value=values)
    return graph.call(python.getitem, done, 0, like=value, value=values[0])



@operator("reduce-twice", "the gradients of a unit are summed over the same ranks twice")
def reduce_twice(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, graph.nodes(Role.REDUCE_GRAD_WAIT))
    start = wait.args[0] if wait is not None else None
    if wait is None or not isinstance(start, fx.Node):
        return None
    users = list(wait.users)
    with graph.graph.inserting_after(wait):
        again = graph.call(ops.all_reduce_grad.default, wait, start.args[-1], like=wait, value=wait.meta.get("val"))
    with graph.graph.inserting_after(again):
        done = graph.call(ops.reduce_grad_wait.default, again, like=wait, value=wait.meta.get("val"))
    for user in users:
        user.replace_input_with(wait, done)
    return graph


@operator("reduce-too-few", "gradients of a unit are not summed over one of the groups that they differ on")
def reduce_too_few(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    wait = choose(rng, graph.nodes(Role.REDUCE_GRAD_WAIT))
    start = wait.args[0] if wait is not None else None
    if wait is None or not isinstance(start, fx.Node):
        return None
    if role_of(start) is Role.ALL_REDUCE_GRAD:
        given = start.args[0]
        if isinstance(given, fx.Node):
            wait.replace_all_uses_with(given)
        else:
            read_elements(wait, given)  # type: ignore[arg-type]
    else:
        given = list(start.args[0])  # type: ignore[arg-type]
        length = int(start.args[1])  # type: ignore[arg-type]
        with graph.graph.inserting_before(wait):
            chunks = [graph.call(aten.chunk.default, g, length, like=wait) for g in given]
            parts = [graph.call(python.getitem, c, 0, like=wait) for c in chunks]
        read_elements(wait, parts)
    if wait.users:
        return None
    graph.graph.erase_node(wait)
    graph.graph.erase_node(start)
    return graph


def read_elements(node: fx.Node, values: Sequence[fx.Node]) -> None:
    """Readers of a list read `values` instead."""
    for user in list(node.users):
        if role_of(user) is Role.GETITEM:
            user.replace_all_uses_with(values[user.args[1]])  # type: ignore[index]
            user.graph.erase_node(user)
        else:
            replace_argument(user, 0, list(values))


@operator("reduce-frozen", "what backward leaves for a frozen parameter is reduced over ranks")
def reduce_frozen(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    frozen = [p.placeholder for p in graph.manifest.parameters if not p.trainable]
    name = choose(rng, frozen)
    group = choose(rng, sorted(graph.manifest.mesh.groups.values()))
    found = gradient(graph, rng)
    if name is None or group is None or found is None:
        return None
    with graph.graph.inserting_before(graph.output):
        shard = graph.placeholder(name)
        zeros = graph.call(aten.zeros_like.default, shard, like=found[1], value=shard.meta.get("val"))
        _all_reduce(graph, zeros, group)
    return graph


@operator("zero-gradient", "zeros are returned as the gradient of a parameter")
def zero_gradient(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    found = gradient(graph, rng)
    if found is None:
        return None
    name, value = found
    with graph.graph.inserting_before(graph.output):
        zeros = graph.call(aten.zeros_like.default, value, like=value, value=value.meta.get("val"))
        set_gradient(graph, name, zeros)
    return graph


@operator("zero-before-reduction", "zeros are reduced in place of a gradient")
def zero_before_reduction(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    entry = choose(rng, entries(graph))
    if entry is None:
        return None
    users = list(entry.users)
    with graph.graph.inserting_after(entry):
        zeros = graph.call(aten.zeros_like.default, entry, like=entry, value=entry.meta.get("val"))
    for user in users:
        user.replace_input_with(entry, zeros)
    return graph


@operator("swap-gradients", "two parameters get each other's gradient")
def swap_gradients(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    shapes = {p.name: (p.layout.full_shape, p.layout.gather_dims, p.dtype) for p in graph.manifest.trainable}
    names = sorted(shapes)
    pairs = [(a, b) for a in names for b in names if a < b and shapes[a] == shapes[b]]
    pair = choose(rng, pairs)
    if pair is None:
        return None
    gradients = graph.gradients
    graph.set_gradients({pair[0]: gradients[pair[1]], pair[1]: gradients[pair[0]]})
    return graph


@operator("lose-a-term", "one of two contributions to a gradient is lost")
def lose_a_term(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    sums = [n for n in graph if n.target is aten.add.Tensor and is_backward(n) and len(n.all_input_nodes) == 2]
    node = choose(rng, sums)
    if node is None:
        return None
    erase(node, rng.choice(node.all_input_nodes))
    return graph


@operator("gradient-in-half", "a gradient loses precision on its way to the reduction")
def gradient_in_half(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    entry = choose(rng, entries(graph))
    value = entry.meta.get("val") if entry is not None else None
    if entry is None or not isinstance(value, torch.Tensor):
        return None
    users = list(entry.users)
    with graph.graph.inserting_after(entry):
        small = graph.call(aten._to_copy.default, entry, like=entry)
        small.kwargs = {"dtype": torch.bfloat16}
    with graph.graph.inserting_after(small):
        back = graph.call(aten._to_copy.default, small, like=entry, value=value)
        back.kwargs = {"dtype": value.dtype}
    for user in users:
        user.replace_input_with(entry, back)
    return graph
