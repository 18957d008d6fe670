"""Rule wait: one wait for each asynchronous collective, and its result is read through that wait."""
from __future__ import annotations

import operator

import pytest
import torch

from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, erase, name_of, replace_argument
from tests.verify.builder import Step

aten, ops, c10d = torch.ops.aten, torch.ops.ep_fx, torch.ops._c10d_functional
broken = Breaks("wait")


@broken()
def r20_missing_wait_of_an_exchange(step: Step) -> None:
    erase(step["combine_wait"], instead=step["combine"])


@broken()
def missing_wait_of_a_gather(step: Step) -> None:
    erase(step["wait_first_forward"], instead=step["unshard_first_forward"])


@broken()
@broken(replicate=2)
def missing_wait_of_a_reduction(step: Step) -> None:
    erase(step["reduce_first_wait"], instead=step["reduce_first"])


@broken()
def waited_for_twice(step: Step) -> None:
    with step.after(step["combine_wait"]):
        again = step.call(c10d.wait_tensor.default, step["combine"], name="again")
    replace_argument(step["combine_end"], 0, again)


@broken()
def result_read_beside_the_wait(step: Step) -> None:
    replace_argument(step["combine_end"], 0, step["combine"])


@broken()
def a_wait_of_the_wrong_kind(step: Step) -> None:
    started = step["unshard_first_forward"]
    with step.after(started):
        other = step.call(ops.reduce_grad_wait.default, started, name="other")
    erase(step["wait_first_forward"], instead=other)


@broken()
def a_wait_of_no_collective(step: Step) -> None:
    with step.after(step["h"]):
        done = step.call(c10d.wait_tensor.default, step["h"], name="done")
    replace_argument(step["scores"], 0, done)


@broken()
def torchs_own_collective_without_a_wait(step: Step) -> None:
    with step.after(step["h"]):
        step.call(c10d.all_reduce.default, step["h"], "sum", "ep", name="stray")


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_is_caught(case: Case) -> None:
    case.run()


def test_elements_of_torchs_list_collectives_are_waited_for_one_by_one() -> None:
    step = Step()
    with step.before(step["scores"]):
        both = step.call(c10d.all_reduce_coalesced.default, [step["h"], step["h"]], "sum", "ep", name="both")
        parts = [step.call(operator.getitem, both, i) for i in range(2)]
        waits = [step.call(c10d.wait_tensor.default, part) for part in parts]
        step.call(aten.add.Tensor, *waits)
    assert verify(step.graph, ["wait"]).ok
    waits[1].args = (parts[0],)
    assert len(verify(step.graph, ["wait"]).of("wait").violations) == 2
