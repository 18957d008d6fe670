"""REG-1 through `transform`: eight cases on 4 ranks, output and all gradients equal the full model's in one process."""
from __future__ import annotations

import pytest

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.requirements.reg1_cases import CASES, MESHES, RANKS, Run, assert_equals_oracle, make_model, run_case


def transformed(rank: int, name: str, sizes: dict[str, int]) -> Run:
    """One case on one rank."""
    return run_case(CASES[name], ep_fx.transform(make_model(CASES[name]), local_mesh(**sizes)), rank)


IN_DEFAULT = ("4 experts", "grouped", "slice", "slice, k=1")
"""The cases that the default suite runs on both meshes; it runs all on the first."""


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            name,
            sizes,
            id=f"{name}-fsdp{sizes['fsdp']}-ep{sizes['ep']}",
            marks=() if sizes is MESHES[0] or name in IN_DEFAULT else pytest.mark.slow,
        )
        for name in CASES
        for sizes in MESHES
    ],
)
def test_reg_1_output_and_all_gradients_equal_the_full_models(
    ranks: RankPools, name: str, sizes: dict[str, int]
) -> None:
    assert_equals_oracle(CASES[name], ranks(RANKS).run(transformed, name, sizes))
