"""What the lines of the table share: reading arguments and types of nodes, and putting others in their place."""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ep_fx.graph import ParallelGraph


def argument(node: fx.Node, index: int) -> fx.Node:
    """Argument `index` of `node`, which is a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def value_of(node: fx.Node) -> Any:
    """The fake value that is recorded of `node`; None where there is none."""
    return node.meta.get("val")


def items_of(node: fx.Node) -> dict[int, fx.Node]:
    """The elements of the result of `node` that somebody takes, by index; each once."""
    items: dict[int, fx.Node] = {}
    for user in list(node.users):
        if user.target is not operator.getitem:
            continue
        index = user.args[1]
        assert isinstance(index, int)
        if index in items:
            user.replace_all_uses_with(items[index])
            node.graph.erase_node(user)
        else:
            items[index] = user
    return items


def item(graph: ParallelGraph, node: fx.Node, index: int) -> fx.Node:
    """A new node: element `index` of the result of `node`, of its value where one is recorded."""
    values = value_of(node)
    return graph.call(operator.getitem, node, index, like=node, value=None if values is None else values[index])


def transposes(node: Any) -> bool:
    """Whether `node` is the transposed view of the matrices of a 3-D tensor."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten.transpose.int:
        return False
    dims = value_of(node).dim()
    return dims == 3 and sorted(dim % dims for dim in node.args[1:]) == [1, 2]


def first_reason(*reasons: str | None) -> str | None:
    """The first of `reasons` that is one."""
    return next((reason for reason in reasons if reason is not None), None)
