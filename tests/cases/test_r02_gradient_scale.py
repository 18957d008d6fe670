"""R02, expert gradients that come out ep_size times too large.

Sources: NVIDIA/Megatron-LM PR#5956, pytorch/pytorch#160285, deepspeedai/DeepSpeed#6545 and #5618,
databricks/megablocks#86.
The exchange has already summed an expert's gradient over its EP group; whoever then divides by the size of the mesh
dimension that is left divides by too little. Adam hides it in the loss, so raw gradients are compared. With one token
for each expert on every rank each entry is 1/4 on any mesh: the divisor is the number of ranks that hold tokens.
"""
from __future__ import annotations

import math

import pytest

from ep_fx.testing import RankPools
from tests.cases.hand import M4, M4E, M8H, assert_shares, hand_run
from tests.models.hand_moe import HandMoE, hand_gradient

ONE_EACH = [[[0, 1, 2, 3]] * 8]


@pytest.mark.parametrize(
    "sizes",
    [
        M4, M4E, {"fsdp": 4, "ep": 1}, M8H, {"ep": 4}, {"fsdp": 4}, {"replicate": 2, "ep": 2}, {"replicate": 4},
        {"replicate": 2, "fsdp": 2, "ep": 1}, {"fsdp": 1, "ep": 1},
    ],
    ids=lambda sizes: "x".join(f"{name}{size}" for name, size in sizes.items()),
)
def test_r02_every_gradient_is_a_quarter_on_every_mesh(ranks: RankPools, sizes: dict[str, int]) -> None:
    runs = ranks(math.prod(sizes.values())).run(hand_run, sizes, ONE_EACH)
    assert_shares(runs, hand_gradient([0.25] * 4))
    assert all(run.sums == [[1, 2, 3, 4]] for run in runs)


def test_r02_sum_is_the_mean_times_the_number_of_data_ranks(ranks: RankPools) -> None:
    runs = ranks(4).run(hand_run, M4, ONE_EACH, "mean", HandMoE, {"grad_reduce": "sum"})
    assert_shares(runs, hand_gradient([1.0] * 4))
