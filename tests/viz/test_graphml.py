"""``.graphml``: networkx reads back the graph that `to_networkx` makes."""

from __future__ import annotations

import networkx as nx

from ep_fx.graph import ParallelGraph
from ep_fx.graph.printer import GraphText
from ep_fx.graph.view import to_networkx
from ep_fx.viz import to_graphml


def test_networkx_reads_back_all_nodes_edges_and_attributes(graph: ParallelGraph) -> None:
    names = GraphText(graph).names
    wanted = nx.relabel_nodes(to_networkx(graph), {node.name: names[node] for node in graph})
    found = nx.parse_graphml(to_graphml(graph), force_multigraph=True)
    assert set(found) == set(wanted)
    kinds = [sorted((a, b, data["kind"]) for a, b, data in view.edges(data=True)) for view in (found, wanted)]
    assert kinds[0] == kinds[1]
    assert set(found) == set(names.values())
    assert all(data["label"] == name for name, data in found.nodes(data=True))
    for name, attributes in wanted.nodes(data=True):
        assert attributes.items() <= found.nodes[name].items()
    assert {data["action"] for _, data in found.nodes(data=True)} >= {"dispatch", "gather", "free", "reduce"}
    assert any(data["bytes"] > 0 for _, data in found.nodes(data=True))
