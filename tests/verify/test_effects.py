"""Rule effects: what the Manifest says the model does is still in the graph."""
from __future__ import annotations

import pytest
import torch

from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, erase, name_of, replace_argument
from tests.verify.builder import Step

broken = Breaks("effects")


@broken()
@broken(sharded=False, backward=False)
def a_buffer_update_cleaned_up(step: Step) -> None:
    erase(step["count_step"])


@broken()
def another_buffer_updated_instead(step: Step) -> None:
    replace_argument(step["count_step"], 0, step["h"])


@broken()
@broken(ep=1)
def combine_cleaned_up(step: Step) -> None:
    replace_argument(step["y"], 0, step["permute_rows"])
    replace_argument(step["unpermute_backward"], 1, step["permute_rows"])
    for name in ("combine_end", "combine_wait", "combine", "combine_ungroup") if step.lowered else ("combine",):
        erase(step[name])


@broken()
@broken(ep=1)
def combine_backward_cleaned_up(step: Step) -> None:
    replace_argument(step["down_backward"], 0, step["unpermute_backward_rows"])
    parts = ("combine_backward_end", "combine_backward_wait", "combine_backward", "combine_backward_send")
    for name in parts if step.lowered else ("combine_backward",):
        erase(step[name])


@broken(ep=1, backward=False, sharded=False)
def a_region_cleaned_up(step: Step) -> None:
    replace_argument(step["y"], 0, step["permute_rows"])
    for name in ("combine", "down", "act", "up", "num_rows"):
        erase(step[name])
    for item in list(step["dispatch"].users):
        erase(item)
    erase(step["dispatch"])


@broken()
def an_output_dropped(step: Step) -> None:
    output = step.graph.output
    output.args = (((), *output.args[0][1:]),)


@broken()
def a_gradient_dropped(step: Step) -> None:
    output = step.graph.output
    outputs, gradients, inputs = output.args[0]
    output.args = ((outputs, gradients[:-1], inputs),)


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_is_caught(case: Case) -> None:
    case.run()


def test_the_update_counts_through_a_view_of_the_buffer() -> None:
    step = Step()
    with step.before(step["count_step"]):
        view = step.call(torch.ops.aten.view.default, step["steps"], [1])
    replace_argument(step["count_step"], 0, view)
    step.record()
    assert verify(step.graph).ok
