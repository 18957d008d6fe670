"""Operators on what is computed: dtypes, buffers, another's weights, values that backward takes from forward."""
from __future__ import annotations

import operator as python
import random
from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, info_of, is_backward, is_mutation, role_of
from ep_fx.graph.effects import written_by
from ep_fx.testing.mutate.base import choose, erase, operator, replace_argument
from ep_fx.testing.mutate.memory import gathered, parameter_of

aten = torch.ops.aten


def computed(graph: ParallelGraph) -> list[fx.Node]:
    """Floating-point tensors that torch operators make."""
    return [n for n in graph if n.op == "call_function" and role_of(n) is Role.OTHER and _is_float(n.meta.get("val"))]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _instead(graph: ParallelGraph, node: fx.Node, target: Any, *rest: Any, **kwargs: Any) -> fx.Node:
    """``target(node, *rest)`` for all readers of `node`."""
    users = list(node.users)
    with graph.graph.inserting_after(node):
        new = graph.call(target, node, *rest, like=node, value=node.meta.get("val"))
        new.kwargs = kwargs
    for user in users:
        user.replace_input_with(node, new)
    return new


@operator("change-dtype", "a value is computed in bfloat16")
def change_dtype(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, computed(graph))
    if node is None:
        return None
    dtype = node.meta["val"].dtype
    small = _instead(graph, node, aten._to_copy.default, dtype=torch.bfloat16)
    _instead(graph, small, aten._to_copy.default, dtype=dtype)
    return graph


@operator("drop-buffer-update", "an update of a buffer is lost")
def drop_buffer_update(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, _updates(graph))
    if node is None:
        return None
    erase(node, next(written_by(node)))
    return graph


def _updates(graph: ParallelGraph) -> list[fx.Node]:
    buffers = {b.placeholder for b in graph.manifest.buffers if b.mutated}
    return [n for n in graph if is_mutation(n) and any(_root(w).target in buffers for w in written_by(n))]


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


@operator("update-a-copy", "a buffer's update goes to a copy of it")
def update_a_copy(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, _updates(graph))
    if node is None:
        return None
    written = next(written_by(node))
    with graph.graph.inserting_before(node):
        copy = graph.call(aten.clone.default, written, like=node, value=written.meta.get("val"))
    node.replace_input_with(written, copy)
    return graph


@operator("update-twice", "a buffer is updated twice")
def update_twice(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, _updates(graph))
    if node is None:
        return None
    with graph.graph.inserting_after(node):
        graph.graph.node_copy(node, lambda n: n)
    return graph


@operator("other-weight", "a computation takes a weight of the same shape that is another's")
def other_weight(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    values = gathered(graph)
    shapes = {v: _shape(v) for v in values}
    places = graph.positions()
    pairs = [
        (reader, a, b)
        for a in values
        for b in values
        if a is not b and shapes[a] == shapes[b] and shapes[a] and parameter_of(a) is not parameter_of(b)
        for reader in a.users
        if role_of(reader) is not Role.RESHARD and reader.op != "output" and places[b] < places[reader]
    ]
    case = choose(rng, pairs)
    if case is None:
        return None
    case[0].replace_input_with(case[1], case[2])
    return graph


def _shape(node: fx.Node) -> tuple[str, ...]:
    value = node.meta.get("val")
    return (str(value.dtype), *map(str, value.shape)) if isinstance(value, torch.Tensor) else ()


@operator("scale-activation", "a value is multiplied by a number")
def scale_activation(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    node = choose(rng, computed(graph))
    if node is None:
        return None
    _instead(graph, node, aten.mul.Tensor, rng.choice((0.5, 1.1, -1.0)))
    return graph


@operator("other-saved-value", "backward takes another value of the same shape from forward")
def other_saved_value(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    saved = [n for n in computed(graph) if not is_backward(n)]
    cases = [(n, u) for n in saved for u in n.users if is_backward(u) and u.op != "output"]
    case = choose(rng, cases)
    if case is None:
        return None
    value, reader = case
    other = choose(rng, [n for n in saved if n is not value and _shape(n) == _shape(value)])
    if other is None:
        return None
    reader.replace_input_with(value, other)
    return graph


@operator("constant-saved-value", "backward computes with ones in place of a value of forward")
def constant_saved_value(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    saved = [n for n in computed(graph) if not is_backward(n)]
    case = choose(rng, [(n, u) for n in saved for u in n.users if is_backward(u) and u.op != "output"])
    if case is None:
        return None
    value, reader = case
    with graph.graph.inserting_before(reader):
        ones = graph.call(aten.ones_like.default, value, like=reader, value=value.meta.get("val"))
    reader.replace_input_with(value, ones)
    return graph


@operator("write-saved-value", "a value that backward needs is overwritten in forward")
def write_saved_value(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    saved = [n for n in computed(graph) if not is_backward(n) and any(is_backward(u) for u in n.users)]
    value = choose(rng, saved)
    if value is None:
        return None
    early = [u for u in value.users if not is_backward(u)]
    with graph.graph.inserting_after(max([value, *early], key=graph.positions().__getitem__)):
        graph.call(aten.mul_.Tensor, value, 2.0, like=value, value=value.meta.get("val"))
    return graph


@operator("keep-in-constant", "what backward needs is kept in a tensor that all calls share")
def keep_in_constant(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    saved = [n for n in computed(graph) if not is_backward(n)]
    case = choose(rng, [(n, u) for n in saved for u in n.users if is_backward(u) and u.op != "output"])
    if case is None:
        return None
    value, reader = case
    name = f"kept_{len(graph.constants)}"
    graph.constants[name] = torch.zeros((), dtype=value.meta["val"].dtype)
    with graph.graph.inserting_after(value):
        total = graph.call(aten.sum.default, value, like=value)
    with graph.graph.inserting_after(total):
        place = graph.graph.get_attr(name)
    with graph.graph.inserting_after(place):
        graph.call(aten.copy_.default, place, total, like=value)
    with graph.graph.inserting_before(reader):  # right for one call at a time: the difference is zero
        change = graph.call(aten.sub.Tensor, place, total, like=reader)
        shifted = graph.call(aten.add.Tensor, value, change, like=reader, value=value.meta["val"])
    reader.replace_input_with(value, shifted)
    return graph


@operator("drop-addend", "one of the two terms of a sum is lost, a residual for instance")
def drop_addend(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    sums = [n for n in graph if n.target is aten.add.Tensor and len(n.all_input_nodes) == 2]
    node = choose(rng, [n for n in sums if not is_backward(n)])
    if node is None:
        return None
    term = choose(rng, [t for t in node.all_input_nodes if _shape(t) == _shape(node)])
    if term is None:
        return None
    erase(node, term)
    return graph


@operator("swap-elements", "a reader takes another element of a list of weights or gradients")
def swap_elements(graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
    elements = [n for n in graph if n.target is python.getitem and isinstance(n.args[1], int) and n.users]
    pairs = [(a, b) for a in elements for b in elements if a is not b and a.args[0] is b.args[0]]
    pair = choose(rng, [(a, b) for a, b in pairs if _shape(a) == _shape(b) and info_of(a).phase is info_of(b).phase])
    if pair is None:
        return None
    first, second = pair[0].args[1], pair[1].args[1]
    replace_argument(pair[0], 1, second)
    replace_argument(pair[1], 1, first)
    return graph
