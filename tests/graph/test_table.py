"""The table of nodes: positions, kinds, whom each reads, and what stands in the wrong place."""
from __future__ import annotations

from ep_fx.graph import Role
from ep_fx.graph.roles import role_of
from ep_fx.graph.table import NodeTable, table_of
from tests.verify.builder import Step


def test_a_table_says_of_each_node_what_the_node_says() -> None:
    step = Step()
    table = NodeTable(step.graph)
    assert table.nodes == list(step.fx.nodes)
    for index, node in enumerate(table.nodes):
        assert table.position[node] == index
        assert table.kinds[index].role is role_of(node)
        assert [table.nodes[source] for source in table.inputs[index]] == node.all_input_nodes
    assert table.misplaced == []


def test_a_reader_before_its_source_is_misplaced_and_the_edge_is_left_out() -> None:
    step = Step()
    source = next(n for n in step.fx.nodes if n.op == "call_function" and n.users)
    reader = next(iter(source.users))
    source.prepend(reader)
    table = NodeTable(step.graph)
    assert (source, reader) in table.misplaced
    assert table.position[source] not in table.inputs[table.position[reader]]


def test_a_placeholder_named_like_an_operator_is_a_placeholder() -> None:
    step = Step()
    placeholder = next(n for n in step.fx.nodes if n.op == "placeholder")
    placeholder.target = "ep_fx::unshard"
    assert NodeTable(step.graph).kinds[0].role is Role.PLACEHOLDER


def test_a_table_of_a_table_is_itself() -> None:
    table = NodeTable(Step().graph)
    assert table_of(table) is table
