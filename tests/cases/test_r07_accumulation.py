"""R07, only the last micro-batch's gradient reaches the optimiser.

Sources: NVIDIA/Megatron-LM PR#7186, NVIDIA-NeMo/Automodel PR#3530, allenai/open-instruct PR#1498.
The buffer that gathers gradients is finished or cleared at every backward. The loss looks fine; only gradients show it.
Here every backward reduces, and what it gives is added to ``.grad`` as always.
"""
from __future__ import annotations

import pytest

from ep_fx.testing import RankPools
from tests.cases.hand import M4, Routing, assert_shares, hand_run
from tests.models.hand_moe import hand_gradient

FIRST: list[Routing] = [[0, 1, 2, 3]] * 4
SECOND: list[Routing] = [[0, 0, 0, 1]] * 4


@pytest.mark.parametrize("second", [SECOND, [[0, 0, 0, 0, 0, 0, 1, 1]] * 4], ids=["4 tokens", "then 8 tokens"])
def test_r07_reduced_at_every_backward_the_micro_batches_add_up(ranks: RankPools, second: list[Routing]) -> None:
    runs = ranks(4).run(hand_run, M4, [FIRST, second])
    assert_shares(runs, hand_gradient([0.5, 0.25, 0.125, 0.125]))
    assert {run.programs for run in runs} == {1}
