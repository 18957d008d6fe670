"""R04 for the eager styles: a rank without tokens, or without tokens for its experts, takes part in every exchange."""
from __future__ import annotations

import pytest

from ep_fx.testing import RankPools
from tests.oracle import assert_all_gradients_close, oracle, relative_error
from tests.styles.cold_runs import PLANS, TOKENS, batch, frozen_input, make_layer, run, sum_loss


@pytest.mark.parametrize("nesting", PLANS)
def test_cold_experts_and_ranks_without_tokens_equal_the_oracle(ranks: RankPools, nesting: str) -> None:
    data = [batch(rank) for rank in range(4)]
    want = oracle(make_layer, [(tokens,) for tokens, _ in data], sum_loss, [(target,) for _, target in data])
    for rank, got in enumerate(ranks(4).run(run, nesting)):
        assert got.output.shape == (1, TOKENS[rank], 64)
        assert relative_error(got.output, want.outputs[rank]) <= 1e-5
        assert_all_gradients_close(got.gradients, want.gradients)


def test_a_cold_rank_of_a_layer_whose_input_wants_no_gradient_still_answers(ranks: RankPools) -> None:
    assert ranks(4).run(frozen_input) == [[True] * 3] * 4
