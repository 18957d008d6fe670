"""Where backward begins follows from the data, whatever the labels say."""
from __future__ import annotations

import pytest

from ep_fx.graph import NodeInfo, Role, set_info
from ep_fx.graph.phases import boundary, tangent_dependents
from ep_fx.graph.table import NodeTable
from tests.verify.builder import Step


def names_around(step: Step) -> tuple[str, str]:
    """The last node that forward needs and the first that only backward can own."""
    cut = boundary(step.graph)
    assert cut is not None
    nodes = list(step.graph)
    return nodes[cut.earliest - 1].name, nodes[cut.latest].name


def test_backward_begins_with_a_gather_that_no_output_needs() -> None:
    assert names_around(Step()) == ("out", "unshard_last_backward")
    assert names_around(Step(rows=6)) == ("out", "pad_last_backward")


def test_without_gathers_it_begins_with_the_first_reader_of_a_tangent() -> None:
    assert names_around(Step(sharded=False)) == ("out", "grad_y")
    assert names_around(Step(keep=True)) == ("out", "grad_y")


def test_labels_do_not_matter() -> None:
    step = Step()
    for node in step.fx.nodes:
        set_info(node, NodeInfo())
    assert names_around(step) == ("out", "unshard_last_backward")


def test_a_buffer_update_behind_the_output_belongs_to_forward() -> None:
    step = Step()
    step["out"].append(step["count_step"])
    assert names_around(step)[0] == "count_step"


def test_a_graph_without_tangents_has_no_backward() -> None:
    step = Step(backward=False)
    assert boundary(step.graph) is None
    assert not any(tangent_dependents(step.graph, NodeTable(step.graph)))


@pytest.mark.parametrize("sharded", [False, True])
def test_every_gradient_depends_on_a_tangent_and_no_forward_node_does(sharded: bool) -> None:
    step = Step(sharded=sharded)
    table = NodeTable(step.graph)
    dependents = {table.nodes[i] for i, depends in enumerate(tangent_dependents(step.graph, table)) if depends}
    assert all(gradient in dependents for gradient in step.graph.gradients.values())
    assert dependents.isdisjoint(step["out"].all_input_nodes)
    assert dependents.isdisjoint(step.graph.nodes(Role.CONTEXT))
