"""From a raw trace to a clean `ParallelGraph` with its Manifest.

before   arg0_1, arg1_1, ...; detach chains; tangent markers; get_attr constants
after    named placeholders (parameters, buffers, inputs, tangents), named regions, phases, no dead node
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import fx

from ep_fx.capture.escapes import refuse_escapes
from ep_fx.capture.experts import Experts
from ep_fx.capture.joint import Trace
from ep_fx.capture.marker import TANGENT
from ep_fx.capture.names import node_infos
from ep_fx.graph import (
    BufferSpec,
    Manifest,
    NodeInfo,
    ParallelGraph,
    ParameterSpec,
    Phase,
    RegionSpec,
    Role,
    alias_root,
    set_info,
)
from ep_fx.graph.effects import written_by
from ep_fx.graph.zeros import is_zero

aten = torch.ops.aten
_IDENTITY = (aten.detach.default, aten.lift_fresh.default)


def build_graph(
    trace: Trace,
    parameters: Sequence[ParameterSpec],
    buffers: Sequence[str],
    experts: Sequence[Experts],
    manifest: Manifest,
) -> ParallelGraph:
    """The clean graph of `trace`.

    Args:
        parameters: in trace order.
        buffers: names in trace order.
        experts: the experts that were installed.
        manifest: what is known before the trace: mesh and policies; returned completed in the graph.

    Raises:
        ValueError: a region of unknown experts, or values of split experts that leave them without a combine.
    """
    nodes = list(trace.module.graph.nodes)
    boundary = next((i for i, n in enumerate(nodes) if n.target is TANGENT), len(nodes))
    infos = node_infos(nodes, boundary)
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    names = _placeholder_names(parameters, buffers, trace)
    for node, name in zip([n for n in nodes if n.op == "placeholder"], names, strict=True):
        env[node] = _placeholder(graph, name, node)
    tangents = [n for n in nodes if n.target is TANGENT]
    for index, node in enumerate(tangents):
        env[node] = _placeholder(graph, f"tangent_{index}", node, Phase.BACKWARD)
    for node in nodes:
        if node not in env and node.op != "output":
            env[node] = _copy(graph, node, env, infos[node])
    output = next(n for n in nodes if n.op == "output")
    result = fx.node.map_arg(output.args[0], lambda n: env[n])
    graph.output(tuple(tuple(part) for part in result))
    constants = {str(n.target): getattr(trace.module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    built = ParallelGraph(graph, manifest, constants)
    built.manifest = _complete(built, manifest, trace, parameters, buffers, experts, names, len(tangents))
    built.remove_dead_code()
    refuse_escapes(built, experts)
    return built


def _placeholder_names(parameters: Sequence[ParameterSpec], buffers: Sequence[str], trace: Trace) -> list[str]:
    given = [*placeholder_names("buffer", buffers), *placeholder_names("input", trace.guards.paths)]
    return [*(p.placeholder for p in parameters), *given]


def placeholder_names(kind: str, names: Iterable[str]) -> list[str]:
    """The placeholders of the parameters, buffers or inputs called `names`: ``a.b_c`` and ``a_b.c`` get two."""
    found: dict[str, None] = {}
    for name in names:
        plain = f"{kind}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}"
        candidates = (plain if number == 1 else f"{plain}__{number}" for number in count(1))
        found[next(c for c in candidates if c not in found)] = None
    return list(found)


def _placeholder(graph: fx.Graph, name: str, like: fx.Node, phase: Phase = Phase.FORWARD) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = like.meta.get("val")
    set_info(node, NodeInfo(phase))
    return node


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any], info: NodeInfo) -> fx.Node:
    """The twin of `node`, or what stands for it where it does nothing."""
    if node.target in _IDENTITY and node.all_input_nodes:
        return env[node.all_input_nodes[0]]  # type: ignore[no-any-return]
    twin = graph.node_copy(node, lambda n: env[n])
    value = node.meta.get("val")
    twin.meta = {} if value is None else {"val": value}
    set_info(twin, info)
    return twin


def _complete(
    graph: ParallelGraph,
    manifest: Manifest,
    trace: Trace,
    parameters: Sequence[ParameterSpec],
    buffers: Sequence[str],
    experts: Sequence[Experts],
    names: Sequence[str],
    tangents: int,
) -> Manifest:
    start, end = len(parameters), len(parameters) + len(buffers)
    mutated = {
        root.target
        for node in graph
        for source in written_by(node)
        for root in alias_root(source)
        if root.op == "placeholder"
    }
    return Manifest(
        mesh=manifest.mesh,
        parameters=tuple(parameters) if trace.differentiable else tuple(_frozen(p) for p in parameters),
        buffers=tuple(BufferSpec(b, n, n in mutated) for b, n in zip(buffers, names[start:end], strict=True)),
        inputs=tuple(names[end:]),
        tangents=tuple(f"tangent_{i}" for i in range(tangents)),
        num_outputs=len(trace.tensor_leaves),
        differentiable=tuple(trace.differentiable),
        input_grads=tuple(names[end:][i] for i in trace.input_grads),
        regions=_regions(graph, parameters, experts),
        zero_gradients=_zero_gradients(graph, parameters) if trace.differentiable else (),
        grad_reduce=manifest.grad_reduce,
        reshard_after_forward=manifest.reshard_after_forward,
        expert_reshard=manifest.expert_reshard,
    )


def _zero_gradients(graph: ParallelGraph, parameters: Sequence[ParameterSpec]) -> tuple[str, ...]:
    """Names of the trainable parameters that autograd found no way to, as they stand before any pass."""
    gradients = graph.output.args[0][1]  # type: ignore[index]
    trainable = [p.name for p in parameters if p.trainable]
    return tuple(name for name, node in zip(trainable, gradients, strict=True) if is_zero(node))  # type: ignore[arg-type]


def _frozen(parameter: ParameterSpec) -> ParameterSpec:
    """In a forward-only graph no gradient is due."""
    return ParameterSpec(
        parameter.name, parameter.placeholder, parameter.dtype, False, parameter.layout, parameter.unit
    )


def _regions(
    graph: ParallelGraph, parameters: Sequence[ParameterSpec], experts: Sequence[Experts]
) -> tuple[RegionSpec, ...]:
    """One entry for each dispatch in forward, in order of execution."""
    known = {e.path: e for e in experts}
    units = {p.name: p.unit for p in parameters}
    flows = {str(n.args[-1]) for n in graph.nodes(Role.COMBINE_BACKWARD)}
    regions = []
    for node in graph.nodes(Role.DISPATCH, Phase.FORWARD):
        name = str(node.args[-1])
        if name not in known:
            raise ValueError(
                f"region {name!r}: ep_fx.moe was called outside a module that ep_fx knows as experts; register its "
                "class with ep_fx.register_experts(cls, fn)"
            )
        e = known[name]
        unit = units[e.parameters[0]] if e.parameters else ""
        regions.append(RegionSpec(name, e.num_experts, e.parameters, unit, name in flows, e.ep))
    return tuple(regions)


__all__ = ["build_graph", "placeholder_names"]
