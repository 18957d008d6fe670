"""Rule order: the list is a linear extension of data and effects, forward before backward."""
from __future__ import annotations

import pytest
import torch

from ep_fx.graph import NodeInfo, Phase, set_info
from ep_fx.graph.effects import effect_edges
from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, name_of, replace_argument
from tests.verify.builder import Step

broken = Breaks("order")


@broken()
def use_before_its_argument(step: Step) -> None:
    step["first_t"].prepend(step["h"])


@broken()
def r46_reshard_before_use(step: Step) -> None:
    step["h"].prepend(step["reshard_first_forward"])


@broken()
@broken(ep=1)
def r46_combine_before_dispatch(step: Step) -> None:
    step["dispatch"].prepend(step["combine"])


@broken()
def a_cycle(step: Step) -> None:
    replace_argument(step["first_t"], 0, step["h"])


@broken()
def backward_work_inside_forward(step: Step) -> None:
    step["y"].prepend(step["tangent_t"])


@broken()
def forward_node_labelled_backward(step: Step) -> None:
    set_info(step["scores"], NodeInfo(Phase.BACKWARD))


@broken()
def backward_node_labelled_forward(step: Step) -> None:
    set_info(step["grad_last"], NodeInfo(Phase.FORWARD))


@broken()
def whole_backward_labelled_forward(step: Step) -> None:
    for node in step.fx.nodes:
        set_info(node, NodeInfo(Phase.FORWARD))


@broken()
def backward_gather_labelled_forward(step: Step) -> None:
    for name in ("unshard_last_backward", "wait_last_backward", "full_last_weight_backward"):
        set_info(step[name], NodeInfo(Phase.FORWARD))


@broken()
def placeholders_exchanged(step: Step) -> None:
    step["steps"].prepend(step["x"])


@broken()
def placeholder_further_down(step: Step) -> None:
    step["first_t"].append(step["tangent"])


@broken()
def a_node_of_another_graph(step: Step) -> None:
    replace_argument(step["h"], 0, Step()["x"])


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_is_caught(case: Case) -> None:
    case.run()


def test_cycle_is_shown_as_a_path() -> None:
    step = Step()
    a_cycle(step)
    assert "cycle, so no order is valid: %h -> %first_t -> %h" in verify(step.graph).explain()


def test_a_buffer_is_read_before_and_after_its_update_in_list_order() -> None:
    step = Step()
    with step.before(step["count_step"]):
        before = step.call(torch.ops.aten.neg.default, step["steps"], name="before")
    with step.after(step["count_step"]):
        after = step.call(torch.ops.aten.neg.default, step["steps"], name="after")
    edges = {(e.before.name, e.after.name) for e in effect_edges(step.graph)}
    assert {(before.name, "count_step"), ("count_step", after.name)} <= edges


def test_effect_edges_keep_every_reader_before_the_reshard() -> None:
    step = Step()
    edges = {(e.before.name, e.after.name) for e in effect_edges(step.graph)}
    assert {("h", "reshard_first_forward"), ("wait_first_forward", "reshard_first_forward")} <= edges
    assert {("up", "reshard_block_experts_forward"), ("down", "reshard_block_experts_forward")} <= edges
