"""A graph as GraphML, for networkx, Gephi, yEd and Cytoscape: all nodes, data edges and order edges.

Node ids are the names of the text form, without %; attributes are those of `graph.view.to_networkx`, with the type and
the bytes.
"""

from __future__ import annotations

import networkx as nx

from ep_fx.graph import ParallelGraph
from ep_fx.graph.printer import GraphText
from ep_fx.graph.sizes import TypicalSizes
from ep_fx.graph.view import to_networkx


def to_graphml(graph: ParallelGraph) -> str:
    """The GraphML document of `graph`."""
    text, sizes, view = GraphText(graph), TypicalSizes(graph), to_networkx(graph)
    for node in graph:
        value = node.meta.get("val")
        view.nodes[node.name].update(
            label=text.names[node],
            type=text.symbols.type(value),
            bytes=sizes.bytes(value),
            action=text.places[node].action.value,
            subject=text.places[node].subject or "",
        )
    view = nx.relabel_nodes(view, {node.name: text.names[node] for node in graph})
    return '<?xml version="1.0" encoding="utf-8"?>\n' + "\n".join(nx.generate_graphml(view)) + "\n"
