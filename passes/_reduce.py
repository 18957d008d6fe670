"""Insert the reduction of one unit's gradients: reduce-scatter, all-reduce where due, one division, in this order."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ep_fx.graph import MeshSpec, NodeInfo, ParallelGraph, ParameterSpec, Phase, set_info
from ep_fx.passes._gather import padded

ops = torch.ops.ep_fx
_Way = tuple[tuple[str, ...], tuple[str, ...]]


def reduce_unit(
    graph: ParallelGraph,
    parameters: Sequence[ParameterSpec],
    gradients: Mapping[str, fx.Node],
    nodes: Mapping[str, fx.Node],
    position: Mapping[fx.Node, int],
) -> dict[str, fx.Node]:
    """Reduces the gradients of `parameters`, those that go the same way together, after the last of them.

    Args:
        gradients: gradient of each parameter name.
        nodes: placeholder of each parameter name.
        position: place of each gradient node in the graph.

    Returns:
        The reduced gradient of each parameter name.
    """
    reduced: dict[str, fx.Node] = {}
    ways: dict[_Way, list[ParameterSpec]] = {}
    for p in parameters:
        rest = tuple(d for d in graph.manifest.reduce_dims(p) if d not in p.layout.gather_dims)
        ways.setdefault((p.layout.gather_dims, rest), []).append(p)
    for (scatter, rest), members in ways.items():
        reduced |= _reduce(graph, members, scatter, rest, gradients, nodes, position)
    return reduced


def _reduce(
    graph: ParallelGraph,
    members: Sequence[ParameterSpec],
    scatter: tuple[str, ...],
    rest: tuple[str, ...],
    gradients: Mapping[str, fx.Node],
    nodes: Mapping[str, fx.Node],
    position: Mapping[fx.Node, int],
) -> dict[str, fx.Node]:
    mesh, divisor = graph.manifest.mesh, graph.manifest.grad_divisor
    if not scatter and not rest and divisor == 1.0:
        return {}
    own = [gradients[p.name] for p in members]
    shards = [padded(g.meta.get("val"), p.layout, 1) for p, g in zip(members, own, strict=True)]
    call = _Caller(graph, members[0].unit, shards)
    with graph.graph.inserting_before(max(own, key=position.__getitem__).next):
        ready, started = _start(graph, call, members, own, scatter)
    with graph.graph.inserting_before(graph.output):
        current = call(ops.reduce_grad_wait.default, started) if started is not None else ready
        for dims in _groups(mesh, rest):
            moving = call(ops.all_reduce_grad.default, current, mesh.group(*dims), name="all_reduce_grad")
            current = call(ops.reduce_grad_wait.default, moving)
        if divisor != 1.0:
            current = call(ops.scale_grad.default, current, divisor, name="scale_grad")
        return _finish(call, members, current, nodes)


class _Caller:
    """Makes backward nodes of one unit; where no fake value is given, it is that of the list of shards."""

    def __init__(self, graph: ParallelGraph, unit: str, shards: list[Any]) -> None:
        self.graph, self.info, self.shards = graph, NodeInfo(Phase.BACKWARD, unit), shards

    def __call__(self, target: Any, *args: Any, name: str | None = None, value: Any = None) -> fx.Node:
        node = self.graph.call(target, *args, name=name, value=self.shards if value is None else value)
        set_info(node, self.info)
        return node


def _start(
    graph: ParallelGraph,
    call: _Caller,
    members: Sequence[ParameterSpec],
    gradients: Sequence[fx.Node],
    scatter: tuple[str, ...],
) -> tuple[list[fx.Node], fx.Node | None]:
    """The gradients as they stand, and the reduce-scatter of them where their parameters are sharded."""
    if not scatter:
        return list(gradients), None
    blocks = []
    for p, gradient in zip(members, gradients, strict=True):
        if not p.layout.is_even:
            stacked = padded(gradient.meta.get("val"), p.layout, len(p.layout.shard_sizes))
            sizes = list(p.layout.shard_sizes)
            gradient = call(ops.disassemble.default, gradient, p.layout.shard_dim, sizes, value=stacked)
        blocks.append(gradient)
    mesh = graph.manifest.mesh
    return blocks, call(ops.reduce_grad.default, blocks, mesh.size(*scatter), mesh.group(*scatter), name="reduce_grad")


def _groups(mesh: MeshSpec, dims: tuple[str, ...]) -> list[tuple[str, ...]]:
    """`dims` as few existing groups, each dimension once."""
    dense = tuple(d for d in dims if d in ("fsdp", "ep"))
    return [group for group in (dense, tuple(d for d in dims if d == "replicate")) if group]


def _finish(
    call: _Caller,
    members: Sequence[ParameterSpec],
    current: fx.Node | list[fx.Node],
    nodes: Mapping[str, fx.Node],
) -> dict[str, fx.Node]:
    """The reduced gradient of each parameter; uneven shards lose their padding."""
    results: dict[str, fx.Node] = {}
    for index, p in enumerate(members):
        if isinstance(current, list):
            node = current[index]
        else:
            node = call(operator.getitem, current, index, name=f"grad_{p.placeholder}", value=call.shards[index])
        if len(set(p.layout.shard_sizes)) > 1:
            placeholder = nodes[p.name]
            node = call(ops.unpad_shard.default, node, p.layout.shard_dim, placeholder, value=call.shards[index])
        results[p.name] = node
    return results
