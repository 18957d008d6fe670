"""Gate and up products with weights of their own become one product, whose halves they are.

    g = grouped_mm(x, w1, c)  u = grouped_mm(x, w3, c)     ->    g, u = split(grouped_mm(x, cat([w1, w3]), c))
    dx = grouped_mm_backward(dg, x, w1, c)[0]                    d = npu_swiglu_backward(dy, gu)
       + grouped_mm_backward(du, x, w3, c)[0]              ->    dx, dw = grouped_mm_backward(d, x, cat([w1, w3]), c)

`swiglu` and `grouped_mm` then find what they take. The weights are copied together once in each direction. Each node
is put where the first of those that it replaces stood; casts and views of the weights move there too. Where another
operand comes later, both products stay apart.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import activation as kernels
from ep_fx.targets.npu.lowering import Lowering
from ep_fx.targets.npu.lowerings.edit import argument, item, items_of, transposes, value_of
from ep_fx.targets.npu.lowerings.patterns import Gradients, SwiGLU, gradients, swiglus

aten, ops = torch.ops.aten, torch.ops.ep_fx


class _Weights(NamedTuple):
    """The weights of both products as they lie in memory.

    Args:
        nodes: without a transposition as a view.
        transposed: they are [E, out, in].
        flipped: for each, whether such a view was taken off.
    """

    nodes: tuple[fx.Node, fx.Node]
    transposed: bool
    flipped: tuple[bool, bool]

    @property
    def dim(self) -> int:
        """The dimension of the features that come out."""
        return 1 if self.transposed else 2


def _apply(graph: ParallelGraph) -> None:
    for found in swiglus(graph):
        if role_of(found.gate) is Role.GROUPED_MM and role_of(found.up) is Role.GROUPED_MM:
            _join(graph, found)


def _join(graph: ParallelGraph, found: SwiGLU) -> None:
    gate, up = found.gate, found.up
    weights = _weights(gate.args[1], up.args[1], gate.args[4], up.args[4])
    biases = gate.args[3], up.args[3]
    together = gate.args[0] is up.args[0] and gate.args[2] is up.args[2] and _same_shape(gate, up)
    if gate is up or not together or weights is None or (biases[0] is None) is not (biases[1] is None):
        return
    first = _first_of(graph, (gate, up), (*weights.nodes, *(b for b in biases if isinstance(b, fx.Node))))
    half = value_of(gate)
    value = half.new_empty((half.shape[0], 2 * half.shape[1]))
    if first is None or checked(kernels.npu_swiglu, (value,)).reason is not None:
        return
    with graph.graph.inserting_before(first):
        weight = _cat(graph, gate, weights.nodes, weights.dim)
        bias = None if biases[0] is None else _cat(graph, gate, biases, 1)
        arguments = (gate.args[0], weight, gate.args[2], bias, weights.transposed)
        whole = graph.call(ops.grouped_mm.default, *arguments, like=gate, value=value)
        split = graph.call(aten.split.Tensor, whole, half.shape[1], 1, like=gate, value=value.split(half.shape[1], 1))
        halves = item(graph, split, 0), item(graph, split, 1)
    backward = list(gradients(found))
    for old, new in zip((gate, up), halves, strict=True):
        old.replace_all_uses_with(new)
    for gradient in backward:
        _join_backward(graph, gradient, whole)


def _join_backward(graph: ParallelGraph, gradient: Gradients, whole: fx.Node) -> None:
    """Joins the two products' backwards, where their gradients of `x` are added up and nothing else."""
    pair = _backward_of(gradient.of_gate), _backward_of(gradient.of_up)
    if pair[0] is None or pair[1] is None or pair[0].args[1] is not pair[1].args[1]:
        return
    nodes = pair[0], pair[1]
    weights = _weights(nodes[0].args[2], nodes[1].args[2], nodes[0].args[5], nodes[1].args[5])
    items = items_of(nodes[0]), items_of(nodes[1])
    total = _total(items[0].get(0), items[1].get(0))
    lost = total is None and (0 in items[0] or 0 in items[1])
    if weights is None or nodes[0].args[3:5] != nodes[1].args[3:5] or lost:
        return
    first = _first_of(graph, nodes, (*weights.nodes, gradient.of_product, whole))
    if first is None:
        return
    with graph.graph.inserting_before(first):
        _emit_backward(graph, gradient, whole, nodes[0], weights, items, total)


def _emit_backward(
    graph: ParallelGraph, gradient: Gradients, whole: fx.Node, like: fx.Node, weights: _Weights,
    items: tuple[dict[int, fx.Node], dict[int, fx.Node]], total: _Total | None,
) -> None:  # fmt: skip
    x, counts, has_bias = like.args[1], like.args[3], like.args[4]
    weight = _cat(graph, like, weights.nodes, weights.dim)
    arguments = (gradient.of_product, whole)
    grad = graph.call(kernels.npu_swiglu_backward, *arguments, like=gradient.of_gate, value=value_of(whole))
    of_bias = value_of(whole).new_empty([value_of(weight).shape[0], value_of(whole).shape[1]] if has_bias else [0])
    value = (value_of(argument(like, 1)), value_of(weight), of_bias)
    arguments = (grad, x, weight, counts, has_bias, weights.transposed)  # type: ignore[assignment]
    both = graph.call(ops.grouped_mm_backward.default, *arguments, like=like, value=value)
    if total is not None:
        grad_x = item(graph, both, 0)
        if total.cast is not None:
            grad_x = graph.call(aten._to_copy.default, grad_x, like=total.cast, value=value_of(total.cast))
            grad_x.kwargs = total.cast.kwargs
        total.node.replace_all_uses_with(grad_x)
    for index, dim in ((1, weights.dim), (2, 1)):
        taken = [(place, each[index]) for place, each in enumerate(items) if index in each]
        if taken and (index == 1 or has_bias):
            gradient_of_both = item(graph, both, index)
            for place, old in taken:
                _take_half(graph, old, gradient_of_both, dim, place, index == 1 and weights.flipped[place])


def _take_half(graph: ParallelGraph, old: fx.Node, whole: fx.Node, dim: int, place: int, flipped: bool) -> None:
    """Puts half `place` of `whole` in the place of `old`, whose matrices are the transposed ones if `flipped`;
    contiguous, for the sum over ranks that follows."""
    half = value_of(whole).shape[dim] // 2
    view = value_of(whole).narrow(dim, place * half, half)
    cut = graph.call(aten.slice.Tensor, whole, dim, place * half, (place + 1) * half, like=old, value=view)
    taken = graph.call(aten.clone.default, cut, like=old, value=view.new_empty(view.shape))
    taken.kwargs = {"memory_format": torch.contiguous_format}
    if flipped:
        for user in list(old.users):
            if transposes(user):
                user.replace_all_uses_with(taken)
        taken = graph.call(aten.transpose.int, taken, 1, 2, like=old, value=value_of(taken).mT)
    old.replace_all_uses_with(taken)


def _backward_of(gradient: fx.Node) -> fx.Node | None:
    """The grouped_mm_backward that takes `gradient`, and alone does."""
    users = list(gradient.users)
    found = [user for user in users if role_of(user) is Role.GROUPED_MM_BACKWARD and user.args[0] is gradient]
    return found[0] if len(users) == len(found) == 1 else None


class _Total(NamedTuple):
    """The sum of two gradients, and the cast of each before it, one of two alike; None where there is none."""

    node: fx.Node
    cast: fx.Node | None


def _total(a: fx.Node | None, b: fx.Node | None) -> _Total | None:
    """The sum of two gradients that nobody else takes, as they are or cast alike."""
    if a is None or b is None or len(a.users) != 1 or len(b.users) != 1:
        return None
    users = (*a.users, *b.users)
    cast = None
    if all(user.target is aten._to_copy.default and len(user.users) == 1 for user in users):
        if users[0].kwargs != users[1].kwargs:
            return None
        a, b, cast = users[0], users[1], users[0]
    (total,), others = a.users, b.users
    adds = total in others and total.target is aten.add.Tensor and not total.kwargs and {*total.args} == {a, b}
    return _Total(total, cast) if adds else None


def _weights(gate: Any, up: Any, gate_transposed: Any, up_transposed: Any) -> _Weights | None:
    """Both weights; None where they lie in memory in different ways."""
    flipped = transposes(gate), transposes(up)
    layouts = {gate_transposed is not flipped[0], up_transposed is not flipped[1]}
    if len(layouts) != 1:
        return None
    nodes = (argument(gate, 0) if flipped[0] else gate), (argument(up, 0) if flipped[1] else up)
    return _Weights(nodes, layouts.pop(), flipped)


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    return bool(value_of(a).shape[-1] == value_of(b).shape[-1])


def _cat(graph: ParallelGraph, like: fx.Node, nodes: Iterable[Any], dim: int) -> fx.Node:
    listed = list(nodes)
    shape = list(value_of(listed[0]).shape)
    shape[dim] = sum(value_of(node).shape[dim] for node in listed)
    return graph.call(aten.cat.default, listed, dim, like=like, value=value_of(listed[0]).new_empty(shape))


_MOVABLE = frozenset({aten._to_copy.default, aten.transpose.int, aten.t.default, aten.view.default})


def _first_of(graph: ParallelGraph, nodes: tuple[fx.Node, ...], operands: Iterable[fx.Node]) -> fx.Node | None:
    """The first of `nodes`, with all of `operands` before it; None where one of them cannot be."""
    position = graph.positions()
    first = min(nodes, key=position.__getitem__)
    late: dict[fx.Node, None] = {}
    stack = list(operands)
    while stack:
        node = stack.pop()
        if position[node] >= position[first]:
            if node.target not in _MOVABLE:
                return None
            late[node] = None
            stack.extend(node.all_input_nodes)
    for node in sorted(late, key=position.__getitem__):
        first.prepend(node)
    return first


JOIN = Lowering(
    name="join",
    takes="two ep_fx.grouped_mm of the same rows, of which aten.silu and mul make a SwiGLU, and their backwards",
    emits=("npu_swiglu_backward",),
    fallback="two products, and aten.silu, mul, silu_backward",
    source="(x @ w1, x @ w3) = x @ (w1, w3)",
    apply=_apply,
)
