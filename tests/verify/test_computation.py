"""Rule computes: numbers of values stay the same however a step is placed, and change with what is computed."""
from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_fx.ops import dispatch_context
from ep_fx.verify import verify
from ep_fx.verify.computation import computation
from tests.verify.breaking import Breaks, Case, name_of, replace_argument, set_gradient
from tests.verify.builder import Step

aten = torch.ops.aten
broken = Breaks("computes")


PLACED: list[dict[str, Any]] = [
    {}, {"policy": "early"}, {"ep": 1}, {"fsdp": 1}, {"replicate": 2}, {"keep": True}, {"lowered": False},
]


@pytest.mark.parametrize("options", PLACED, ids=str)
def test_where_values_travel_changes_no_number(options: dict[str, Any]) -> None:
    """One process, nothing sharded, nothing exchanged, says the same as every placement of the step."""
    assert computation(Step(**options).graph) == computation(Step(sharded=False, ep=1, fsdp=1).graph)


def test_uneven_cuts_change_no_number() -> None:
    assert computation(Step(rows=6, fsdp=4).graph) == computation(Step(rows=6, sharded=False, lowered=False).graph)


def test_names_and_labels_are_in_no_number() -> None:
    step = Step()
    before = computation(step.graph)
    for index, node in enumerate(step.fx.nodes):
        if node.op == "call_function":
            node._rename(f"n{index}")
            node.meta.clear()
    assert computation(step.graph) == before


def test_a_graph_without_record_is_not_judged() -> None:
    step = Step()
    step.graph.manifest.computation.clear()  # type: ignore[attr-defined]
    step["out"].target = aten.add.Tensor
    assert "computes" not in verify(step.graph).broken


@pytest.mark.parametrize("index", range(4))
def test_a_record_that_is_missing_among_others_is_noticed(index: int) -> None:
    step = Step()
    lost = list(step.graph.manifest.computation)[index]
    del step.graph.manifest.computation[lost]  # type: ignore[attr-defined]
    found = verify(step.graph).of("computes").violations
    assert [lost in violation.expected for violation in found] == [True]


@broken()
@broken(sharded=False, lowered=False)
@broken(ep=1)
def another_operator(step: Step) -> None:
    step["act"].target = aten.silu.default


@broken()
def operands_swapped(step: Step) -> None:
    step["h"].args = (step["first_t"], step["x"])


@broken()
def another_number(step: Step) -> None:
    replace_argument(step["act_backward"], 2, 1)


@broken()
def minus_one_and_minus_two(step: Step) -> None:
    """Python gives both the same hash."""
    assert hash(-1) == hash(-2)
    replace_argument(step["scores"], 1, -2)


@broken()
def gradients_swapped(step: Step) -> None:
    first, second = "block.experts.w1", "block.experts.w2"
    values = dict(step.gradients)
    set_gradient(step, first, values[second])
    set_gradient(step, second, values[first])


@broken()
@broken(sharded=False)
def list_of_a_reduction_reordered(step: Step) -> None:
    lists = [n for n in step.fx.nodes if n.name == "reduce_block_experts"]
    if lists:
        replace_argument(lists[0], 0, list(reversed(lists[0].args[0])))
    else:
        gradients_swapped(step)


@broken()
def weights_swapped(step: Step) -> None:
    started = step["unshard_block_experts_forward"]
    replace_argument(started, 0, list(reversed(started.args[0])))


@broken()
@broken(ep=1)
def a_term_lost(step: Step) -> None:
    step["grad_h_t"].args = (step["permute_backward"],)


@broken()
def scaled_before_the_reduction(step: Step) -> None:
    gradient = step["grad_last"]
    users = list(gradient.users)
    with step.after(gradient):
        half = step.call(aten.mul.Tensor, gradient, 0.5)
    for user in users:
        user.replace_input_with(gradient, half)


@broken()
def a_value_overwritten_before_backward(step: Step) -> None:
    with step.after(step["out"]):
        step.call(aten.mul_.Tensor, step["y"], 2.0)


@broken()
@broken(backward=False, sharded=False)
def a_buffer_updated_by_another_number(step: Step) -> None:
    replace_argument(step["count_step"], 1, 2)


@broken()
def rows_that_never_left(step: Step) -> None:
    step["dispatch_end"].replace_input_with(step["dispatch_wait"], step["dispatch_send"])


@broken()
def counts_of_nobody(step: Step) -> None:
    counts = next(n for n in step.fx.nodes if n.target is dispatch_context)
    with step.before(counts):
        other = step.call(aten.mul.Tensor, counts.args[0], 1)
    replace_argument(counts, 0, other)


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_broken(case: Case) -> None:
    case.run()
