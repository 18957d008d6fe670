"""Large graphs for speed, and graphs with hostile names."""
from __future__ import annotations

import torch
from torch import fx

from ep_fx.graph import Manifest, MeshSpec, NodeInfo, ParallelGraph, Phase, set_info

ATEN = torch.ops.aten
HOSTILE = 'a<b>&"\'</script><script>alert(1)</script>]]>\x00'


def layers(count: int, per_layer: int) -> ParallelGraph:
    """A forward and a mirrored backward chain with a residual in each of `count` layers."""
    graph = ParallelGraph(fx.Graph(), Manifest(MeshSpec({}, {}), (), (), ("x",), ("tangents_0",), 1, (0,)))
    value, tangent = graph.graph.placeholder("x"), graph.graph.placeholder("tangents_0")
    kept = []
    for layer in range(count):
        start = value
        for step in range(per_layer):
            value = graph.call(ATEN.relu.default, value, fqn=f"layers.{layer}.part{step % 4}")
        value = graph.call(ATEN.add.Tensor, value, start, fqn=f"layers.{layer}")
        kept.append(value)
    grad = tangent
    for layer in reversed(range(count)):
        for step in range(per_layer):
            args = (grad, kept[layer], 0)
            grad = graph.call(
                ATEN.threshold_backward.default, *args, phase=Phase.BACKWARD, fqn=f"layers.{layer}.part{step % 4}"
            )
    set_info(graph.graph.output(((value,), (), (grad,))), NodeInfo(Phase.BACKWARD))
    return graph


def hostile() -> ParallelGraph:
    """A graph whose input and modules have names that no format may take literally."""
    graph = ParallelGraph(fx.Graph(), Manifest(MeshSpec({}, {}), (), (), (HOSTILE,), (), 1, ()))
    x = graph.graph.placeholder("x")
    x.target = HOSTILE
    y = graph.call(ATEN.relu.default, x, fqn=HOSTILE)
    z = graph.call(ATEN.add.Tensor, y, y, fqn=f"{HOSTILE}.inner")
    set_info(z, NodeInfo(Phase.FORWARD, f"{HOSTILE}.inner", f"/x/{HOSTILE}.py:1"))
    graph.graph.output(((z,), (), ()))
    return graph
