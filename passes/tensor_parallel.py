"""Lower the sums of partial outputs to all-reduces over `tp`.

    before   x = tp_share(rows)   ..   y = tp_sum(partial)
    after    x = rows             ..   y = wait_tensor(all_reduce(partial, "sum", tp))

In backward the same, the other way round: the gradient of the rows is summed, that of the partial output is not.
Shapes do not change. One walk; two nodes a sum, none for a share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Pass, Role, role_of

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Makes the sums over ``tp`` explicit."""

    name: ClassVar[str] = "tensor-parallel"
    provides: ClassVar[frozenset[str]] = frozenset({"tensor-parallel"})

    def apply(self, graph: ParallelGraph) -> None:
        """Lowers every ``tp_share`` and ``tp_sum``."""
        for node in list(graph):
            role = role_of(node)
            if role is Role.TP_SHARE:
                _replace(graph, node, node.all_input_nodes[0])
            elif role is Role.TP_SUM:
                with graph.graph.inserting_before(node):
                    _replace(graph, node, _summed(graph, node))


def _summed(graph: ParallelGraph, node: fx.Node) -> fx.Node:
    group, value = graph.manifest.mesh.group("tp"), node.meta.get("val")
    started = graph.call(
        c10d.all_reduce.default, node.args[0], "sum", group, like=node, name="all_reduce_partial", value=value
    )
    return graph.call(c10d.wait_tensor.default, started, like=node, value=value)


def _replace(graph: ParallelGraph, node: fx.Node, instead: fx.Node) -> None:
    node.replace_all_uses_with(instead)
    graph.graph.erase_node(node)
