"""What the blind operators share. Their author had not seen the verifier: faults of MoE training, not of rules.

A node that is changed keeps its name and its label, and a new one takes the label of what it stands beside, so no label
tells that anything was done.
"""
from __future__ import annotations

import operator as python
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from ep_fx.graph import (
    ParallelGraph,
    Phase,
    RegionNodes,
    Role,
    copy_info,
    find_regions,
    info_of,
    role_of,
    target_name,
)

aten = torch.ops.aten
ops = torch.ops.ep_fx
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


# -- looking -------------------------------------------------------------------------------------------------------
def named(graph: ParallelGraph, *names: str, phase: Phase | None = None) -> list[fx.Node]:
    """The nodes whose operator has one of these schema names, in order."""
    return [node for node in graph.nodes(phase=phase) if target_name(node) in names]


def part(node: fx.Node, index: int) -> fx.Node | None:
    """The element `index` of the tuple that `node` gives, None where nobody reads it."""
    return next((user for user in node.users if user.target is python.getitem and user.args[1] == index), None)


def readers(node: fx.Node, phase: Phase | None = None) -> list[fx.Node]:
    """Those who read `node`, of one phase where it is given; the graph's output is none of them."""
    return [u for u in node.users if u.op == "call_function" and (phase is None or info_of(u).phase is phase)]


def first_argument(node: fx.Node) -> fx.Node:
    """The first argument, which is a node."""
    return cast(fx.Node, node.args[0])


def type_of(node: fx.Node) -> tuple[torch.dtype, tuple[str, ...]] | None:
    """Dtype and sizes of a tensor as captured, symbols by name; None for anything else."""
    value = node.meta.get("val")
    return (value.dtype, tuple(map(str, value.shape))) if isinstance(value, torch.Tensor) else None


def twins(nodes: Sequence[fx.Node], node: fx.Node) -> list[fx.Node]:
    """Those of `nodes` that are not `node` and have its type."""
    wanted = type_of(node)
    return [other for other in nodes if wanted is not None and other is not node and type_of(other) == wanted]


def exchanges(graph: ParallelGraph, phase: Phase | None = None) -> list[fx.Node]:
    """The exchanges of rows, not those of counts."""
    return [node for node in graph.nodes(Role.EXCHANGE, phase) if isinstance(node.args[1], fx.Node)]


def other_groups(graph: ParallelGraph, group: str) -> list[str]:
    """Groups over other dimensions of this mesh with as many ranks."""
    mesh = graph.manifest.mesh
    own = mesh.dims_of(group) or ()
    return [name for dims, name in mesh.groups.items() if dims != own and mesh.size(*dims) == mesh.size(*own)]


def lowered_regions(graph: ParallelGraph) -> list[RegionNodes]:
    """The regions whose exchange is spelled out."""
    return [region for region in find_regions(graph) if role_of(region.source) is Role.CONTEXT]


def elements(node: fx.Node) -> list[fx.Node]:
    """The nodes of the list that is the first argument of `node`."""
    return list(cast(list[fx.Node], node.args[0])) if isinstance(node.args[0], (list, tuple)) else []


def in_order(graph: ParallelGraph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """`nodes` in the order of the graph."""
    return sorted(nodes, key=graph.positions().__getitem__)


# -- editing -------------------------------------------------------------------------------------------------------
def put(graph: ParallelGraph, before: fx.Node, target: Any, *args: Any, like: fx.Node, value: Any = None) -> fx.Node:
    """A new node before `before`, labelled as it is; its value is that of `like` where none is given."""
    label = like if before.op == "output" else before
    with graph.graph.inserting_before(before):
        return graph.call(target, *args, like=label, value=like.meta.get("val") if value is None else value)


def through(
    graph: ParallelGraph, node: fx.Node, users: Sequence[fx.Node], target: Any, *args: Any, value: Any = None
) -> fx.Node:
    """`users`, who read `node`, read ``target(node, *args)`` instead, made before the first of them."""
    new = put(graph, in_order(graph, users)[0], target, node, *args, like=node, value=value)
    for user in users:
        user.replace_input_with(node, new)
    return new


def truncated(graph: ParallelGraph, node: fx.Node, users: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
    """`users` read `node` after a trip through `dtype` and back."""
    value = node.meta["val"]
    with value.fake_mode:
        low = value.to(dtype)
    narrow = through(graph, node, users, aten._to_copy.default, value=low)
    narrow.kwargs = {"dtype": dtype}
    wide = through(graph, narrow, users, aten._to_copy.default, value=value)
    wide.kwargs = {"dtype": value.dtype}
    return wide


def become(node: fx.Node, target: Any, *args: Any) -> None:
    """`node` computes something else of the same type and keeps its name and label."""
    node.target, node.args, node.kwargs = target, args, {}


def again(graph: ParallelGraph, nodes: Sequence[fx.Node], before: fx.Node) -> dict[fx.Node, fx.Node]:
    """Copies of `nodes`, in the phase of `before`, that read each other; by original."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        with graph.graph.inserting_before(before):
            copies[node] = graph.graph.node_copy(node, lambda n: copies.get(n, n))
        copy_info(copies[node], node, phase=info_of(before).phase)
    return copies


def set_element(node: fx.Node, index: int, value: fx.Node) -> None:
    """Sets one element of the list that is the first argument of `node`."""
    values = list(cast(list[fx.Node], node.args[0]))
    values[index] = value
    node.args = (values, *node.args[1:])


def has_role(node: Any, *roles: Role) -> bool:
    """Whether `node` is a node with one of these roles."""
    return isinstance(node, fx.Node) and role_of(node) in roles
