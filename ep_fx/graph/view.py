"""A graph as a networkx graph, for questions that networkx answers: cycles, dominance, paths, critical path.

Building it costs more than every rule together, so rules do not use it.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
from torch import fx

from ep_fx.graph.effects import effect_edges
from ep_fx.graph.info import info_of
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.roles import role_of, target_name


def to_networkx(graph: ParallelGraph) -> nx.MultiDiGraph:
    """Nodes by name, with data edges (``kind="data"``) and effect edges (``kind="effect"``, with a ``reason``).

    Node attributes: ``target``, ``role``, ``phase``, ``fqn``, ``source``, ``position``. All are strings or ints, so
    that the graph can be written in any of networkx's formats.
    """
    view = nx.MultiDiGraph()
    for position, node in enumerate(graph):
        info = info_of(node)
        view.add_node(
            node.name,
            target=target_name(node),
            role=role_of(node).name,
            phase=info.phase.value,
            fqn=info.fqn or "",
            source=info.source or "",
            position=position,
        )
    for node in graph:
        view.add_edges_from((source.name, node.name, {"kind": "data"}) for source in node.all_input_nodes)
    view.add_edges_from(
        (edge.before.name, edge.after.name, {"kind": "effect", "reason": edge.reason}) for edge in effect_edges(graph)
    )
    return view


def critical_path(graph: ParallelGraph, cost: Callable[[fx.Node], float]) -> list[fx.Node]:
    """The chain of nodes, along data and effect edges, whose costs add up to most; in order."""
    nodes = {node.name: node for node in graph}
    weighted = nx.DiGraph()
    weighted.add_nodes_from(nodes)
    for before, after in to_networkx(graph).edges():
        weighted.add_edge(before, after, weight=cost(nodes[before]))
    return [nodes[name] for name in nx.dag_longest_path(weighted, weight="weight")]
