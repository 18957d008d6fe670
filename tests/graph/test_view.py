"""The networkx view: data and effect edges, attributes, questions it answers."""

from __future__ import annotations

import networkx as nx

from ep_fx.graph import Role
from ep_fx.graph.view import critical_path, to_networkx
from tests.verify.builder import Step


def test_every_node_and_edge_is_there_and_the_list_is_a_topological_order() -> None:
    graph = Step().graph
    view = to_networkx(graph)
    assert list(view) == [node.name for node in graph]
    data = [(a, b) for a, b, kind in view.edges(data="kind") if kind == "data"]
    assert sorted(data) == sorted((i.name, n.name) for n in graph for i in n.all_input_nodes)
    assert all(view.nodes[a]["position"] < view.nodes[b]["position"] for a, b in view.edges())
    assert nx.is_directed_acyclic_graph(view)


def test_a_reshard_follows_every_reader_by_effect_edges() -> None:
    graph = Step().graph
    view = to_networkx(graph)
    for reshard in graph.nodes(Role.RESHARD):
        effects = [a for a, _, kind in view.in_edges(reshard.name, data="kind") if kind == "effect"]
        assert effects, reshard.name
        assert nx.ancestors(view, reshard.name) >= set(effects)


def test_each_dispatch_dominates_what_takes_its_context() -> None:
    graph = Step().graph
    view = nx.DiGraph(to_networkx(graph))
    view.add_edges_from(("start", name) for name in list(view) if view.in_degree(name) == 0)
    dominators = nx.immediate_dominators(view, "start")
    (context,) = graph.nodes(Role.CONTEXT)
    for item in context.users:
        assert dominators[item.name] == context.name


def test_critical_path_goes_through_what_costs_most() -> None:
    graph = Step().graph
    path = critical_path(graph, lambda node: 1.0)
    assert path[0].op == "placeholder"
    products = critical_path(graph, lambda node: 100.0 if "mm" in node.name else 0.01)
    assert sum("mm" in node.name for node in products) >= sum("mm" in node.name for node in path)
