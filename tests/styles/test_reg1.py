"""REG-1 with the eager style: all eight cases, output and every gradient, for each way to combine it with FSDP."""
from __future__ import annotations

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_fx.testing import RankPools
from tests.requirements.reg1_cases import CASES, MESHES, Run, assert_equals_oracle, make_model, run_case
from tests.styles.nestings import NESTINGS, Outer, made, own_mesh


def runs(rank: int, nesting: str, sizes: dict[str, int]) -> dict[str, Run]:
    """Each case on this rank."""
    mesh = own_mesh(**sizes)
    return {name: run_case(case, made(nesting, make_model(case), mesh), rank) for name, case in CASES.items()}


def _assert_all_equal_the_oracle(found: list[dict[str, Run]]) -> None:
    for name, case in CASES.items():
        assert_equals_oracle(case, [run[name] for run in found])


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_reg_1_with_fsdp(ranks: RankPools, nesting: str, sizes: dict[str, int]) -> None:
    _assert_all_equal_the_oracle(ranks(4).run(runs, nesting, sizes))


def test_reg_1_without_fsdp(ranks: RankPools) -> None:
    _assert_all_equal_the_oracle(ranks(4).run(runs, "style alone", {"ep": 4}))


class Checkpointed(Outer):
    """Computes the layer again in backward, exchange included."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.moe, x, use_reentrant=False)


def checkpointed(rank: int, nesting: str) -> Run:
    """One case under activation checkpointing."""
    case = CASES["slice, shared"]
    return run_case(case, Checkpointed(made(nesting, make_model(case), own_mesh(**MESHES[0]))), rank)


@pytest.mark.parametrize("nesting", ["style on the MoE, then FSDP on it", "FSDP on the MoE, then style on it"])
def test_reg_1_under_activation_checkpointing(ranks: RankPools, nesting: str) -> None:
    assert_equals_oracle(CASES["slice, shared"], ranks(4).run(checkpointed, nesting))
