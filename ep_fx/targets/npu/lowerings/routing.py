"""permute and unpermute, forward and backward, by the kernels that permute tokens.

    rows, counts, order = permute(x, ids, E)       rows, sorted_indices = npu_moe_token_permute(x, ids)
                                             ->    counts = tokens_per_expert(ids, E)
    y = unpermute(rows, order, weights)            y = npu_moe_token_unpermute(rows, sorted_indices, weights)

One sort serves four nodes, so all of them are lowered or none is.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.targets.npu.checked import checked
from ep_fx.targets.npu.kernels import routing as kernels
from ep_fx.targets.npu.lowering import Lowering, keep
from ep_fx.targets.npu.lowerings.edit import argument, first_reason, item, items_of, value_of

_NAME = "permute"
Planned = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of the target and its arguments."""


def _apply(graph: ParallelGraph) -> None:
    for node in graph.nodes(Role.PERMUTE):
        readers = list(items_of(node)[2].users) if 2 in items_of(node) else []
        reason = first_reason(_unfit(node), *map(_unfit_reader, readers))
        if reason is not None:
            for kept in (node, *readers):
                keep(kept, _NAME, reason)
            continue
        with graph.graph.inserting_before(node):
            sorted_indices = _permute(graph, node)
        for reader in readers:
            target, arguments = _PLANS[role_of(reader)][1](reader, sorted_indices)
            with graph.graph.inserting_before(reader):
                _replace(reader, graph.call(target, *arguments, like=reader, value=value_of(reader)), graph)


def _unfit(node: fx.Node) -> str | None:
    top_k = value_of(argument(node, 1)).shape[1]
    if isinstance(top_k, int) and not top_k:
        return "no expert for any token"
    return checked(kernels.npu_moe_token_permute, node.args[:2]).reason


def _unfit_reader(node: fx.Node) -> str | None:
    role = role_of(node)
    if role not in _PLANS:
        return f"permuted_indices are read by %{node.name}, which is no part of the dialect's routing"
    place, plan = _PLANS[role]
    target, arguments = plan(node, _as_int32(value_of(argument(node, place))))
    return checked(target, arguments).reason


def _permute(graph: ParallelGraph, node: fx.Node) -> fx.Node:
    """Puts the kernel in the place of `node`; the node of its sorted_indices."""
    x, ids, num_experts = node.args
    rows, counts, order = value_of(node)
    value = (rows, _as_int32(order))
    permuted = graph.call(kernels.npu_moe_token_permute, x, ids, like=node, value=value)
    items = items_of(node)
    if 0 in items:
        items[0].replace_all_uses_with(item(graph, permuted, 0))
    if 1 in items:
        counted = graph.call(kernels.tokens_per_expert, ids, num_experts, like=node, value=counts)
        items[1].replace_all_uses_with(counted)
    return item(graph, permuted, 1)


def _replace(node: fx.Node, lowered: fx.Node, graph: ParallelGraph) -> None:
    items = items_of(node)
    for index, taken in items.items():
        taken.replace_all_uses_with(item(graph, lowered, index))
    if not items:
        node.replace_all_uses_with(lowered)


def _as_int32(order: torch.Tensor) -> torch.Tensor:
    return order.new_empty(order.shape, dtype=torch.int32)


def _permute_backward(node: fx.Node, sorted_indices: Any) -> Planned:
    grad, _, num_tokens, top_k = node.args
    return kernels.npu_moe_token_permute_grad_v2, (grad, sorted_indices, num_tokens, top_k)


def _unpermute(node: fx.Node, sorted_indices: Any) -> Planned:
    rows, _, weights = node.args
    return kernels.npu_moe_token_unpermute, (rows, sorted_indices, weights)


def _unpermute_backward(node: fx.Node, sorted_indices: Any) -> Planned:
    grad, rows, _, weights = node.args
    return kernels.npu_moe_token_unpermute_grad_v2, (grad, sorted_indices, weights, rows)


_PLANS: dict[Role, tuple[int, Callable[[fx.Node, Any], Planned]]] = {
    Role.PERMUTE_BACKWARD: (1, _permute_backward),
    Role.UNPERMUTE: (1, _unpermute),
    Role.UNPERMUTE_BACKWARD: (2, _unpermute_backward),
}
"""Where the order stands among the arguments of a node, and the call that replaces it."""

ROUTING = Lowering(
    name=_NAME,
    takes="ep_fx.permute, permute_backward, unpermute, unpermute_backward",
    emits=(
        "npu_moe_token_permute", "npu_moe_token_permute_grad_v2", "npu_moe_token_unpermute",
        "npu_moe_token_unpermute_grad_v2", "tokens_per_expert",
    ),
    fallback="the dialect's own kernels: ATen",
    source="aclnnMoeTokenPermute, aclnnMoeTokenUnpermute and their gradients",
    apply=_apply,
)
