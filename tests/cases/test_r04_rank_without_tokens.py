"""R04, an EP rank that receives no tokens crashes, or leaves the others waiting.

Sources: NVIDIA/Megatron-LM#1877, PR#4851 and PR#3626, NVIDIA-NeMo/Automodel PR#935, PaddlePaddle/PaddleFormers PR#3010.
The idle rank reshapes an empty tensor, or returns a fresh one that autograd knows nothing of and then skips the
exchange of backward, for which its peers wait.
"""
from __future__ import annotations

from ep_fx.testing import RankPools, assert_same_sequence
from tests.cases.hand import M4, assert_shares, hand_run
from tests.models.hand_moe import hand_gradient

COLD = [[0, 0, 0, 0], [0, 0, 1, 1]] * 2  # experts 2 and 3, all that the second ep rank has, get nothing


def test_r04_cold_experts_have_zero_gradients_and_the_idle_rank_takes_part(ranks: RankPools) -> None:
    runs = ranks(4).run(hand_run, M4, [COLD])
    assert_shares(runs, hand_gradient([0.75, 0.25, 0, 0]))
    for rank, run in enumerate(runs):
        assert run.sums == [[e + 1 for e in COLD[rank]]]
        assert run.requires_grad == [True]
        assert run.gradient[2:].eq(0).all()
    assert_same_sequence([run.events for run in runs])
    counts = {len(run.events) for run in runs}
    assert len(counts) == 1
    assert counts.pop() >= 3  # two exchanges of the region, and the reductions
