"""Gradients of experts' weights in fp32 where the weights are in half precision (off by default).

    dw = npu_grouped_matmul(t(a), b, counts, None, 2)   ->   dw = npu_grouped_matmul_add_(a, b, counts), fp32

What follows, up to the reduction over ranks and the output, takes what it gets: its recorded values become fp32 too.
Behind `GROUPED_MM`. A gradient that meets a conversion on its way keeps the dtype of that.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import matmul
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.edit import argument, value_of

aten, ops = torch.ops.aten, torch.ops.ep_fx
_NAME = "main_grads"
_HALVES = (torch.bfloat16, torch.float16)
_VIEWS = frozenset({aten.t.default, aten.transpose.int})
_FOLLOW = frozenset(
    {
        operator.getitem, aten.t.default, aten.transpose.int, aten.slice.Tensor, aten.clone.default, aten.add.Tensor,
        aten.view.default, aten.reshape.default, aten.permute.default, aten.split.Tensor, aten.cat.default,
        aten.select.int, ops.disassemble.default, ops.pad_shard.default, ops.unpad_shard.default,
        ops.reduce_grad.default, ops.reduce_grad_wait.default, ops.all_reduce_grad.default, ops.scale_grad.default,
    }
)  # fmt: skip
"""What may stand between a gradient and the output, and gives the dtype that it gets."""


def _apply(graph: ParallelGraph) -> None:
    for node in list(graph):
        if node.target is not matmul.npu_grouped_matmul or node.args[4:] != (2,):
            continue
        if value_of(node).dtype not in _HALVES:
            keep(node, _NAME, f"its weights are in {value_of(node).dtype}")
            continue
        view, right, counts = (argument(node, index) for index in range(3))
        reason = _unfit(node, view, right, counts)
        if reason is not None:
            keep(node, _NAME, reason)
            continue
        value = value_of(node).to(torch.float32)
        with graph.graph.inserting_before(node):
            left = argument(view, 0)
            sums = graph.call(matmul.npu_grouped_matmul_add_, left, right, counts, like=node, value=value)
        node.replace_all_uses_with(sums)
        graph.graph.erase_node(node)
        _widen(sums)


def _unfit(node: fx.Node, view: fx.Node, right: fx.Node, counts: fx.Node) -> str | None:
    if view.target not in _VIEWS:
        return f"%{view.name} is no transposed view of rows"
    others = [user.name for user in _readers(node) if user.target not in _FOLLOW and user.op != "output"]
    if others:
        return f"its gradient is read by %{others[0]}, which may not take fp32"
    return checked(matmul.npu_grouped_matmul_add_, (argument(view, 0), right, counts)).reason


def _readers(node: fx.Node) -> list[fx.Node]:
    """Everything that depends on `node`, as far as values follow its dtype."""
    found: dict[fx.Node, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user not in found:
            found[user] = None
            pending += list(user.users) if user.target in _FOLLOW else []
    return list(found)


def _widen(node: fx.Node) -> None:
    """Records of what follows `node` that its result is in fp32. In a list only the items that come of it are."""
    for user in list(node.users):
        if user.target not in _FOLLOW or value_of(user) is None:
            continue
        before = value_of(user)
        user.meta["val"] = _wider(user, node, before)
        if user.meta["val"] is not before:
            _widen(user)


def _wider(user: fx.Node, node: fx.Node, value: Any) -> Any:
    if isinstance(value, Tensor):
        source: Any = value_of(node)
        if user.target is operator.getitem:
            source = source[user.args[1]]
        wide = isinstance(source, Tensor) and source.dtype is torch.float32 and value.dtype in _HALVES
        return value.to(torch.float32) if wide else value
    listed = user.args[0] if isinstance(user.args[0], (list, tuple)) else None
    nodes = [item for item in listed or () if isinstance(item, fx.Node)]
    given = value_of(node) if listed is None else [value_of(item) for item in nodes]
    same = isinstance(given, (list, tuple)) and len(given) == len(value)
    if not same:  # parts of one tensor
        return type(value)(item.to(value_of(node).dtype) for item in value)
    pairs = zip(value, given, strict=True)
    changed = [v.to(g.dtype) if v.dtype is not g.dtype else v for v, g in pairs]
    return value if all(a is b for a, b in zip(changed, value, strict=True)) else type(value)(changed)


MAIN_GRADS = Lowering(
    name=_NAME,
    takes="npu_grouped_matmul with group_type 2",
    emits=("npu_grouped_matmul_add_",),
    fallback="the gradient in the dtype of the weight",
    source="torch_npu 2.13.0, npu_grouped_matmul_add",
    apply=_apply,
)
