"""API-2: experts cut over `tp`, alone, with EP, with FSDP: output and every gradient of the full model."""
from __future__ import annotations

import pytest

from ep_fx import ExpertParallel, ExpertTensorParallel, TensorParallel
from ep_fx.testing import RankPools
from tests.styles.halves import assert_equals_the_full_model, run

ALONE, FIRST, LAST = "style alone", "style on the MoE, then FSDP on it", "FSDP on the MoE, then style on it"
DENSE = "style on the experts, FSDP of all else over fsdp x ep"
ON_4 = {
    "ep x tp": (ALONE, ExpertTensorParallel(), {"ep": 2, "tp": 2}),
    "tp": (ALONE, TensorParallel(), {"tp": 4}),
    "tp, then fsdp": (FIRST, TensorParallel(), {"fsdp": 2, "tp": 2}),
    "fsdp, then tp": (LAST, TensorParallel(), {"fsdp": 2, "tp": 2}),
    "ep of a mesh with tp": (ALONE, ExpertParallel(), {"ep": 4, "tp": 1}),
    "ep x tp, fsdp of one rank": (FIRST, ExpertTensorParallel(), {"fsdp": 1, "ep": 2, "tp": 2}),
}


@pytest.mark.parametrize("case", ON_4)
def test_api_2_on_4_ranks(ranks: RankPools, case: str) -> None:
    assert_equals_the_full_model(ranks(4).run(run, *ON_4[case]))


@pytest.mark.parametrize(
    ("nesting", "grouped"),
    [
        (FIRST, True),
        pytest.param(LAST, True, marks=pytest.mark.slow),
        pytest.param(DENSE, False, marks=pytest.mark.slow),
    ],
)
def test_api_2_etp_with_fsdp_on_8_ranks(ranks: RankPools, nesting: str, grouped: bool) -> None:
    sizes = {"fsdp": 2, "ep": 2, "tp": 2}
    assert_equals_the_full_model(ranks(8).run(run, nesting, ExpertTensorParallel(), sizes, grouped))


@pytest.mark.slow
@pytest.mark.parametrize("nesting", [FIRST, LAST])
def test_ep_with_hybrid_fsdp_on_8_ranks(ranks: RankPools, nesting: str) -> None:
    """FSDP averages over replicate and fsdp, the style over ep."""
    sizes = {"replicate": 2, "fsdp": 2, "ep": 2}
    assert_equals_the_full_model(ranks(8).run(run, nesting, ExpertParallel(), sizes))
