"""Shard the parameters: unshard before first use, reshard after last use, reduce each gradient once.

    before   y = mm(x, t(param))                      ...  return y, grad
    after    g = unshard([shard]) [w] = unshard_wait(g) y = mm(x, t(w)) reshard([w])
             ...  r = reduce_grad([grad]) [s] = scale_grad(reduce_grad_wait(r), data ranks)  return y, s

A unit is gathered as one collective, once in each direction, and in backward only those of its parameters that backward
reads. Forward views and casts of a parameter that backward reads are made again there, from the new gather.
Gradients are summed over the dimensions of `Manifest.reduce_dims` and divided by the one `Manifest.grad_divisor`.
Cost: 4 + 2 per parameter nodes a unit and direction, 4 + 2 per parameter a reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import fx

from ep_fx.graph import ParallelGraph, ParameterSpec, Pass, Phase
from ep_fx.passes._again import make_again_in_backward
from ep_fx.passes._gather import Gather, gather_unit, padded
from ep_fx.passes._reduce import reduce_unit
from ep_fx.passes._uses import ParameterUses, Span, Travel, travels


@dataclass(frozen=True)
class Fsdp(Pass):
    """Inserts unshard / reshard / reduce_grad nodes for every unit of the Manifest.

    Its options are policies of the Manifest, by which the rules judge the result: None leaves them as they are, and
    `transform` fixes the others before capture.

    Args:
        reshard: `Manifest.expert_reshard`, when the experts of a region are freed.
        after_forward: `Manifest.reshard_after_forward`, whether parameters are freed between forward and backward.
    """

    name: ClassVar[str] = "fsdp"
    provides: ClassVar[frozenset[str]] = frozenset({"fsdp"})
    reshard: Literal["strict", "early"] | None = None
    after_forward: bool | None = None

    @property
    def policies(self) -> Mapping[str, Any]:
        """The policies of the Manifest that its options name."""
        named = {"expert_reshard": self.reshard, "reshard_after_forward": self.after_forward}
        return {policy: value for policy, value in named.items() if value is not None}

    def apply(self, graph: ParallelGraph) -> None:
        """Works on all units; the graph's parameter placeholders become shards."""
        nodes = {spec.name: node for node, spec in graph.parameter_nodes().items()}
        if graph.manifest.reshard_after_forward:
            make_again_in_backward(graph, nodes)
            graph.remove_dead_code()  # forward views that only backward read, and now makes again
        uses = ParameterUses(graph, nodes)
        regions = travels(graph)
        experts = {name for region in graph.manifest.regions for name in region.parameters}
        gathers = []
        for unit, members in graph.manifest.units.items():
            for together in _by_group(members):
                gathers += _plan(graph, unit, together, uses, regions.get(unit, {}), experts)
        full = {name: node.meta.get("val") for name, node in nodes.items()}
        for gather in gathers:
            gather_unit(graph, gather, nodes, uses, full)
        _set_shard_values(graph, nodes)
        gradients, reduced = graph.gradients, dict[str, fx.Node]()
        for members in graph.manifest.units.values():
            trained = [p for p in members if p.trainable]
            reduced |= reduce_unit(graph, trained, gradients, nodes, uses.position)
        graph.set_gradients(reduced)


def _by_group(members: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """The sharded parameters of a unit, those of one group together: a norm inside experts is cut over other ranks."""
    groups: dict[tuple[str, ...], list[ParameterSpec]] = {}
    for p in members:
        if p.layout.gather_dims:
            groups.setdefault(p.layout.gather_dims, []).append(p)
    return list(groups.values())


def _plan(
    graph: ParallelGraph,
    unit: str,
    sharded: list[ParameterSpec],
    uses: ParameterUses,
    region: dict[Phase, Travel],
    experts: set[str],
) -> list[Gather]:
    """The gathers of one group of one unit: one for each direction in which its parameters are used.

    Args:
        region: where the rows of the unit's experts travel; gathers of their parameters span it (strict).
        experts: names of all experts' parameters.
    """
    forward = [p for p in sharded if uses.span(p, Phase.FORWARD)]
    backward = [p for p in sharded if uses.span(p, Phase.BACKWARD)]
    strict = graph.manifest.expert_reshard == "strict"

    def span(parameters: list[ParameterSpec], phase: Phase) -> Span:
        spans = [uses.span(p, phase) for p in parameters]
        first = min((s.first for s in spans if s), key=uses.position.__getitem__)
        last = max((s.last for s in spans if s), key=uses.position.__getitem__)
        if phase in region and any(p.name in experts for p in parameters):
            first = min(first, region[phase].first, key=uses.position.__getitem__)
            if strict and (back := region[phase].back) is not None:
                last = max(last, back, key=uses.position.__getitem__)
        return Span(first, last)

    if forward and backward and not graph.manifest.reshard_after_forward:
        whole = [p for p in sharded if p in forward or p in backward]
        bounds = Span(span(forward, Phase.FORWARD).first, span(backward, Phase.BACKWARD).last)
        return [Gather(unit, whole, bounds, (Phase.FORWARD, Phase.BACKWARD))]
    gathers = []
    if forward:
        gathers.append(Gather(unit, forward, span(forward, Phase.FORWARD), (Phase.FORWARD,)))
    if backward:
        gathers.append(Gather(unit, backward, span(backward, Phase.BACKWARD), (Phase.BACKWARD,)))
    return gathers


def _set_shard_values(graph: ParallelGraph, nodes: dict[str, fx.Node]) -> None:
    """The placeholders are shards now. An uneven shard is recorded with its padded size, the same on all ranks."""
    for p in graph.manifest.parameters:
        value = nodes[p.name].meta.get("val")
        if p.layout.gather_dims and value is not None:
            nodes[p.name].meta["val"] = padded(value, p.layout, 1)
