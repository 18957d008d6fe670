"""Rule ep-order: expert weights are whole from before the exchange until after it, in both directions."""
from __future__ import annotations

import pytest

from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, name_of
from tests.verify.builder import Step

broken = Breaks("ep-order")


@broken()
@broken(policy="early")
def r20_dispatch_before_unshard(step: Step) -> None:
    """HO-01: the exchange starts while the experts are still sharded."""
    gather = ("unshard", "wait", "full_block_experts_w1_forward", "full_block_experts_w2_forward")
    _move_gather(step, "dispatch_end", "forward", gather)


@broken(ep=1)
@broken(ep=1, policy="early")
def dispatch_before_unshard_with_local_experts(step: Step) -> None:
    gather = ("unshard", "wait", "full_block_experts_w1_forward", "full_block_experts_w2_forward")
    _move_gather(step, "dispatch", "forward", gather)


@broken()
def unshard_between_count_exchange_and_dispatch(step: Step) -> None:
    step["exchange_counts"].append(step["unshard_block_experts_forward"])
    step["context"].append(step["wait_block_experts_forward"])
    for item in ("full_block_experts_w2_forward", "full_block_experts_w1_forward"):
        step["wait_block_experts_forward"].append(step[item])


@broken()
@broken(ep=1)
def r20_reshard_before_combine(step: Step) -> None:
    """HO-02: legal for data (policy early does so), not under the strict policy."""
    step["down"].append(step["reshard_block_experts_forward"])


@broken()
def reshard_in_the_middle_of_combine(step: Step) -> None:
    step["combine_wait"].append(step["reshard_block_experts_forward"])


@broken()
def combine_backward_before_unshard(step: Step) -> None:
    gather = ("unshard", "wait", "full_block_experts_w1_backward", "full_block_experts_w2_backward")
    _move_gather(step, "combine_backward_end", "backward", gather)


@broken()
@broken(ep=1)
@broken(keep=True)
def reshard_before_dispatch_backward(step: Step) -> None:
    step["up_backward"].append(step["reshard_block_experts_backward"])


def _move_gather(step: Step, behind: str, phase: str, names: tuple[str, ...]) -> None:
    place = step[behind]
    for name in names:
        node = step[name if name.startswith("full") else f"{name}_block_experts_{phase}"]
        place.append(node)
        place = node


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_is_caught(case: Case) -> None:
    report = case.run()
    assert not {"order", "pair", "wait"} & set(report.broken), "legal for data: only the policy forbids it"


def test_early_policy_frees_after_the_last_use() -> None:
    step = Step(policy="early")
    positions = step.graph.positions()
    assert positions[step["reshard_block_experts_forward"]] < positions[step["combine"]]
    assert verify(step.graph).ok
