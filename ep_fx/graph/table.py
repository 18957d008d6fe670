"""The nodes of a graph as a table: what several walks share, so that each need not go through the nodes anew.

    position   node            kind            inputs
    0          %x              placeholder     ()
    1          %t = aten.t(x)  aten::t         (0,)

A walk over positions and kinds stays in a few arrays, where one over nodes visits objects all over memory: on 100,000
nodes that is most of its cost. One walk, O(nodes + edges); the graph must not change while a table is in use.
"""
from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ep_fx.graph.roles import Kind, kind_of


class NodeTable:
    """Nodes in order, what each is, and whom it reads.

    Args:
        nodes: all nodes of one graph, in order.
    """

    __slots__ = ("inputs", "kinds", "misplaced", "nodes", "position")

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self.nodes: list[fx.Node] = list(nodes)
        self.kinds: list[Kind] = [kind_of(node) for node in self.nodes]
        """What follows from each target."""
        self.inputs: list[tuple[int, ...]] = []
        """Positions of the nodes that each reads, as far as they stand before it."""
        self.position: dict[fx.Node, int] = {}
        self.misplaced: list[tuple[fx.Node, fx.Node]] = []
        """(source, reader) of each edge whose source does not stand before its reader."""
        position, inputs = self.position, self.inputs
        for index, node in enumerate(self.nodes):
            sources = node._input_nodes
            try:
                inputs.append(tuple([position[source] for source in sources]))
            except KeyError:
                inputs.append(tuple(position[source] for source in sources if source in position))
                self.misplaced += [(source, node) for source in sources if source not in position]
            position[node] = index

    def __len__(self) -> int:
        return len(self.nodes)


def table_of(nodes: Iterable[fx.Node] | NodeTable) -> NodeTable:
    """`nodes` as a table."""
    return nodes if isinstance(nodes, NodeTable) else NodeTable(nodes)
