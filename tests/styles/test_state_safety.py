"""ST-1 to ST-7, SS-01 and SS-02 for the eager styles: what dispatch knows lives in the call and nowhere else."""
from __future__ import annotations

import inspect
from typing import Any

import pytest

from ep_fx import DispatchContext
from ep_fx.styles import combine, dispatch
from ep_fx.testing import RankPools
from tests.styles.state_runs import PLANS, interleavings, lifetimes, state


@pytest.mark.parametrize("nesting", PLANS)
def test_ss_01_micro_batches_that_interleave_equal_their_solo_runs(ranks: RankPools, nesting: str) -> None:
    for found in ranks(4).run(interleavings, nesting):
        assert len(found) == (5 if nesting == "style alone" else 3)
        assert all(faults == [] for faults in found.values()), found


@pytest.mark.parametrize("nesting", PLANS)
def test_ss_02_after_combine_and_backward_nothing_holds_the_context(ranks: RankPools, nesting: str) -> None:
    for found in ranks(4).run(lifetimes, nesting):
        assert found == {
            # uses of the context (rows, scores), alive after forward, alive at the end, tensor objects at the end
            "train": [2, 2, 0, 0],
            "dropped loss": [2, 2, 0, 0],
            "no grad": [2, 0, 0, 0],
        }


@pytest.fixture(scope="module")
def states(ranks: RankPools) -> list[dict[str, Any]]:
    return ranks(4).run(state)


def test_st_1_a_run_changes_no_attribute_of_any_module_parameter_style_or_global(states: list[dict[str, Any]]) -> None:
    for facts in states:
        assert facts["watched"] > 100
        assert facts["changed"] == []


def test_st_2_dispatch_returns_the_context_and_st_4_combine_takes_it_as_an_argument() -> None:
    assert inspect.signature(dispatch).return_annotation.rstrip("]").endswith("DispatchContext")
    assert list(inspect.signature(combine).parameters) == ["module", "routed_output", "context", "device_mesh"]
    assert issubclass(DispatchContext, tuple)  # ST-3


def test_st_6_the_exchange_is_no_hook_and_st_7_callers_see_what_they_saw(states: list[dict[str, Any]]) -> None:
    for facts in states:
        assert facts["same module"]
        assert facts["seen by callers"]
        assert facts["hooks"] == 0
