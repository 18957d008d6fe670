"""R13, ranks that hold different numbers of tokens.

Sources: NVIDIA-NeMo/Automodel#1364 and PR#3631, deepseek-ai/DeepEP#604, PrimeIntellect-ai/prime-rl PR#3411.
Whoever guesses a peer's size from his own hangs in the first forward. The convention here is the mean over ranks of
each rank's own mean; weighting by tokens is the caller's choice ("sum", with the loss divided by the global count).
"""
from __future__ import annotations

import pytest

from ep_fx.testing import RankPools, assert_same_sequence
from tests.cases.hand import M4, assert_shares, hand_run
from tests.models.hand_moe import HandMoE, hand_gradient

STAIRS = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
WITH_AN_EMPTY_RANK = [[], [0, 1, 2, 3, 0], [1], [2, 3, 3]]


def test_r13_the_gradient_is_the_mean_of_the_ranks_means(ranks: RankPools) -> None:
    runs = ranks(4).run(hand_run, M4, [STAIRS])
    assert_shares(runs, hand_gradient([0.520833, 0.270833, 0.145833, 0.0625]))
    assert [run.sums for run in runs] == [[[e + 1 for e in stairs]] for stairs in STAIRS]


@pytest.mark.parametrize(("reduce", "divisor"), [("mean", 4), ("sum", 1)])
def test_r13_a_rank_without_tokens_joins_every_collective(ranks: RankPools, reduce: str, divisor: int) -> None:
    runs = ranks(4).run(hand_run, M4, [WITH_AN_EMPTY_RANK], "sum", HandMoE, {"grad_reduce": reduce})
    assert_shares(runs, hand_gradient([2 / divisor, 2 / divisor, 2 / divisor, 3 / divisor]))
    assert [run.sums for run in runs] == [[[e + 1 for e in routing]] for routing in WITH_AN_EMPTY_RANK]
    assert_same_sequence([run.events for run in runs])
