"""Rows that arrived into expert order and back, by the kernels that permute tokens, with one sort for a region.

    ctx = dispatch_context(..)                ctx = npu.dispatch_context(..)
    r = regroup(x, ctx.permuted_indices)      r, sorted_indices = npu_moe_token_permute(x, ctx.expert_ids)
    y = ungroup(h, ctx.permuted_indices)  ->  y = npu_moe_token_unpermute(h, sorted_indices)
    backward: regroup(dy, ..)                 npu_moe_token_unpermute_grad_v2(dy, sorted_indices)
    backward: ungroup(dr, ..)                 npu_moe_token_permute_grad_v2(dr, sorted_indices)

The first node that reads the order sorts. Weights that travel with their rows are moved alike.
"""
from __future__ import annotations

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.graph.info import is_backward
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import routing as kernels
from ep_fx.targets.npu.kernels.context import dispatch_context
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.edit import argument, first_reason, item, items_of, value_of

_NAME = "regroup"
_SIZE = torch.ops.aten.sym_size.int


def _apply(graph: ParallelGraph) -> None:
    for node in graph.nodes(Role.CONTEXT):
        order = items_of(node).get(0)
        readers = [] if order is None else list(order.users)
        reason = first_reason(*map(_unfit, readers))
        if reason is not None:
            for kept in readers:
                keep(kept, _NAME, reason)
            continue
        node.target = dispatch_context
        if order is not None:
            indices = value_of(order)
            order.meta["val"] = indices.new_empty(indices.shape, dtype=torch.int32)
            _lower(graph, order, [reader for reader in graph if reader in order.users])


def _unfit(node: fx.Node) -> str | None:
    if role_of(node) in (Role.REGROUP, Role.UNGROUP):
        order = value_of(argument(node, 1))
        ids = order.new_empty(order.shape, dtype=torch.int32)
        return checked(kernels.npu_moe_token_permute, (node.args[0], ids)).reason
    return None if node.target is _SIZE else f"permuted_indices are read by %{node.name}, which moves no rows"


def _lower(graph: ParallelGraph, expert_ids: fx.Node, readers: list[fx.Node]) -> None:
    """Lowers `readers` of one context, which stand in the order of the graph."""
    sorted_indices = None
    for node in readers:
        role = role_of(node)
        if role not in (Role.REGROUP, Role.UNGROUP):
            continue
        rows, values = argument(node, 0), value_of(node)
        with graph.graph.inserting_before(node):
            if sorted_indices is None:
                permuted = graph.call(
                    kernels.npu_moe_token_permute, rows, expert_ids, like=node, value=(values, value_of(expert_ids))
                )
                sorted_indices = item(graph, permuted, 1)
                moved = item(graph, permuted, 0) if role is Role.REGROUP else None
            else:
                moved = None
            node.replace_all_uses_with(moved or _moved(graph, node, sorted_indices))
        graph.graph.erase_node(node)


def _moved(graph: ParallelGraph, node: fx.Node, sorted_indices: fx.Node) -> fx.Node:
    """The node that does with a known order what `node` does."""
    rows, value = argument(node, 0), value_of(node)
    if role_of(node) is Role.REGROUP:
        target = kernels.npu_moe_token_unpermute_grad_v2
        return item(graph, graph.call(target, rows, sorted_indices, like=node, value=(value, None)), 0)
    if is_backward(node):
        return graph.call(
            kernels.npu_moe_token_permute_grad_v2, rows, sorted_indices, None, 1, like=node, value=value
        )
    return graph.call(kernels.npu_moe_token_unpermute, rows, sorted_indices, like=node, value=value)


REGROUP = Lowering(
    name=_NAME,
    takes="dispatch_context, ep_fx.regroup, ungroup",
    emits=(
        "dispatch_context", "npu_moe_token_permute", "npu_moe_token_permute_grad_v2", "npu_moe_token_unpermute",
        "npu_moe_token_unpermute_grad_v2",
    ),
    fallback="the dialect's own kernels: ATen",
    source="aclnnMoeTokenPermute, aclnnMoeTokenUnpermute and their gradients",
    apply=_apply,
)
