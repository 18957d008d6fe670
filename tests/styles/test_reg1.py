"""REG-1 with the eager style: all eight cases, output and every gradient, for each way to combine it with FSDP."""
from __future__ import annotations

import pytest

from ep_fx.testing import RankPools
from tests.requirements.reg1_cases import CASES, MESHES, Run, assert_equals_oracle, make_model, run_case
from tests.styles.nestings import NESTINGS, made, own_mesh


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
