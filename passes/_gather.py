"""Insert one gather: pad, unshard, wait, assemble before the first use, reshard after the last."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ep_fx.graph import Layout, NodeInfo, ParallelGraph, ParameterSpec, Phase, info_of, set_info
from ep_fx.passes._uses import ParameterUses, Span

ops = torch.ops.ep_fx


@dataclass(frozen=True)
class Gather:
    """One gather to insert.

    Args:
        unit: FSDP unit.
        parameters: what is gathered.
        span: from the node before which it stands to the node after which it is freed.
        phases: the directions whose uses it serves.
    """

    unit: str
    parameters: list[ParameterSpec]
    span: Span
    phases: tuple[Phase, ...]


def gather_unit(
    graph: ParallelGraph, gather: Gather, nodes: dict[str, fx.Node], uses: ParameterUses, full_values: dict[str, Any]
) -> None:
    """Inserts `gather` and lets the uses in its phases read the gathered values."""
    with graph.graph.inserting_before(gather.span.first):
        full = _unshard(graph, gather, nodes, full_values)
    for parameter in gather.parameters:
        for phase in gather.phases:
            for reader in uses.readers.get((parameter.name, phase), ()):
                if nodes[parameter.name] in reader.all_input_nodes:
                    reader.replace_input_with(nodes[parameter.name], full[parameter.name])
    with graph.graph.inserting_after(gather.span.last):
        graph.call(ops.reshard.default, list(full.values()), phase=gather.phases[-1], fqn=gather.unit, name="reshard")


def _unshard(
    graph: ParallelGraph, gather: Gather, nodes: dict[str, fx.Node], full_values: dict[str, Any]
) -> dict[str, fx.Node]:
    mesh = graph.manifest.mesh
    dims = gather.parameters[0].layout.gather_dims
    world, group = mesh.size(*dims), mesh.group(*dims)
    info = NodeInfo(gather.phases[0], gather.unit, info_of(gather.span.first).source)

    def call(target: Any, *args: Any, name: str | None = None, value: Any = None) -> fx.Node:
        node = graph.call(target, *args, name=name, value=value)
        set_info(node, info)
        return node

    shards, buffers = [], []
    for p in gather.parameters:
        layout, like = p.layout, full_values[p.name]
        shard = nodes[p.name]
        if len(set(layout.shard_sizes)) > 1:
            shard = call(
                ops.pad_shard.default, shard, layout.shard_dim, layout.padded_size, value=padded(like, layout, 1)
            )
        shards.append(shard)
        buffers.append(padded(like, layout, world))
    started = call(ops.unshard.default, shards, world, group, name="unshard", value=buffers)
    done = call(ops.unshard_wait.default, started, name="unshard_wait", value=buffers)
    full: dict[str, fx.Node] = {}
    for index, p in enumerate(gather.parameters):
        node = call(operator.getitem, done, index, name=f"full_{p.placeholder}", value=buffers[index])
        if not p.layout.is_even:
            sizes = list(p.layout.shard_sizes)
            node = call(ops.assemble.default, node, p.layout.shard_dim, sizes, name=f"full_{p.placeholder}")
        node.meta["val"] = full_values[p.name]
        full[p.name] = node
    return full


def padded(like: Any, layout: Layout, world: int) -> Any:
    """Fake value of `world` padded shards stacked on dim 0."""
    if like is None or not like.dim():
        return like  # nothing is known, or nothing is cut
    shape = list(like.shape)
    shape[layout.shard_dim] = layout.padded_size
    shape[0] *= world
    with like.fake_mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
