"""The cases of HandMoE whose numbers are known by hand, on an npu mesh: cold experts, ranks without tokens."""
from __future__ import annotations

import pytest

from ep_fx.testing import RankPool, assert_same_sequence
from tests.cases.hand import M4, Routing, assert_shares, hand_run
from tests.models.hand_moe import HandMoE, hand_gradient

ROUTINGS: dict[str, tuple[list[Routing], list[int]]] = {
    "cold_experts": ([[0, 0, 0, 0], [0, 0, 1, 1]] * 2, [12, 4, 0, 0]),
    "a_rank_without_tokens": ([[], [0, 1, 2, 3, 0], [1], [2, 3, 3]], [2, 2, 2, 3]),
    "one_expert_has_all": ([[3, 3], [3], [3, 3, 3], []], [0, 0, 0, 6]),
    "nobody_has_tokens": ([[], [], [], []], [0, 0, 0, 0]),
}
"""Experts of each rank's tokens, and the tokens of each expert."""


@pytest.mark.parametrize("name", ROUTINGS)
def test_r04_r13_on_the_npu(npu_ranks: RankPool, name: str) -> None:
    routing, tokens = ROUTINGS[name]
    runs = npu_ranks.run(hand_run, M4, [routing], "sum", HandMoE, {"grad_reduce": "sum"})
    assert_shares(runs, hand_gradient(tokens))
    assert [run.sums for run in runs] == [[[e + 1 for e in mine]] for mine in routing]
    assert_same_sequence([run.events for run in runs])
