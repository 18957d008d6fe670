"""SwiGLU as it looks in a joint graph: ``silu(gate) * up``, and what autograd makes of it.

    s = silu(gate)   y = s * up             forward
    d_up = dy * s                           backward
    d_gate = silu_backward(dy * up, gate)
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.targets.npu.lowerings.edit import value_of

aten = torch.ops.aten


class SwiGLU(NamedTuple):
    """One product of a gate and what it lets through: nodes."""

    gate: fx.Node
    up: fx.Node
    silu: fx.Node
    product: fx.Node


class Gradients(NamedTuple):
    """The gradients of gate and up for one gradient of the product: nodes."""

    of_product: fx.Node
    of_gate: fx.Node
    of_up: fx.Node


def swiglus(graph: ParallelGraph) -> list[SwiGLU]:
    """Every such product, in order."""
    found = []
    for silu in graph.graph.find_nodes(op="call_function", target=aten.silu.default):
        gate = silu.args[0]
        for product in silu.users:
            up = _other_factor(product, silu)
            if up is not None and isinstance(gate, fx.Node) and _alike(gate, up):
                found.append(SwiGLU(gate, up, silu, product))
    return found


def gradients(of: SwiGLU) -> Iterator[Gradients]:
    """What backward computes from it: once, or not at all."""
    for of_gate in list(of.gate.users):
        if of_gate.target is not aten.silu_backward.default or of_gate.args[1] is not of.gate:
            continue
        gradient = of_gate.args[0]
        of_product = _other_factor(gradient, of.up) if isinstance(gradient, fx.Node) else None
        for of_up in list(of.silu.users) if of_product is not None else ():
            if of_product is not None and _other_factor(of_up, of.silu) is of_product:
                yield Gradients(of_product, of_gate, of_up)


def _other_factor(node: fx.Node, factor: fx.Node) -> fx.Node | None:
    """The node that `node` multiplies `factor` with."""
    if node.target is not aten.mul.Tensor or factor not in node.args[:2]:
        return None
    other = node.args[1] if node.args[0] is factor else node.args[0]
    return other if isinstance(other, fx.Node) else None


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether both are tensors of one dtype and number of dimensions."""
    left, right = value_of(a), value_of(b)
    tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return tensors and left.dtype is right.dtype and left.dim() == right.dim()


def whole_of(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The tensor whose first and second half along the last dimension `gate` and `up` are."""
    if any(role_of(node) is not Role.GETITEM for node in (gate, up)) or gate.args[0] is not up.args[0]:
        return None
    split = gate.args[0]
    if (gate.args[1], up.args[1]) != (0, 1) or not isinstance(split, fx.Node):
        return None
    whole = split.args[0]
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default) or not isinstance(whole, fx.Node):
        return None
    value, dim = value_of(whole), split.args[2] if len(split.args) > 2 else 0
    width = value_of(gate).shape[-1]
    last = isinstance(dim, int) and dim % value.dim() == value.dim() - 1
    return whole if last and value.shape[-1] == 2 * width == 2 * value_of(up).shape[-1] else None


def joined(a: fx.Node, b: fx.Node) -> list[fx.Node]:
    """The nodes that put `a` and `b` together along their last dimension."""

    last = value_of(a).dim() - 1

    def puts_together(node: fx.Node) -> bool:
        listed: Any = node.args[0] if node.args else None
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        return node.target is aten.cat.default and list(listed) == [a, b] and dim % (last + 1) == last

    return [node for node in a.users if puts_together(node)]
