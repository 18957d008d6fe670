"""Ways to transform and use a module: modes, plan={}, explicit forms, meta device."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools
from tests.api.modes_runs import (
    GroupedMoE,
    OwnMoE,
    dense_on_purpose,
    explicit_forms,
    from_meta,
    left_behind,
    modes,
    rows_of,
    square,
)
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import Oracle, assert_all_gradients_close, oracle, relative_error

IDS = [(token_ids(rank),) for rank in range(4)]


def one_block() -> Oracle:
    return oracle(lambda: TinyMoE(blocks=1), IDS, next_token_loss, IDS)


def test_train_eval_and_no_grad_are_captured_apart_at_their_first_call(ranks: RankPools) -> None:
    for found in ranks(4).run(modes):
        assert found["captures"] == [0, 1, 2, 3, 3, 4]
        assert found["with backward"] == [True, True, False, False]
        assert found["requires_grad"] == [True, True, False, False]
        assert found["eval equals eager"]
        assert found["train is eager's, dropped and scaled"]
        assert found["dropped"] == [True, True]
        assert found["train varies"]


def test_an_empty_plan_shards_the_experts_like_everything_else_and_exchanges_nothing(ranks: RankPools) -> None:
    want = one_block()
    for rank, (ops, gradients, logits) in enumerate(ranks(4).run(dense_on_purpose)):
        assert not any("all_to_all" in op for op in ops)
        assert relative_error(logits, want.outputs[rank]) <= 1e-5
        assert_all_gradients_close(gradients, want.gradients)


@pytest.mark.parametrize("make", [OwnMoE, GroupedMoE])
def test_explicit_forms_equal_the_same_model_in_one_process(ranks: RankPools, make: type[nn.Module]) -> None:
    batches = [(rows_of(rank),) for rank in range(4)]
    want = oracle(make, batches, square)
    for rank, found in enumerate(ranks(4).run(explicit_forms)):
        y, gradients, input_gradient, exchanges = found[make.__name__]
        assert exchanges >= 5  # counts, rows there and back, and both again in backward
        assert relative_error(y, want.outputs[rank]) <= 1e-5
        assert_all_gradients_close(gradients, want.gradients)
        of_mean_loss = batches[rank][0].grad
        assert of_mean_loss is not None
        assert_all_gradients_close({"x": input_gradient}, {"x": 4 * of_mean_loss})  # a rank's own loss is not divided


def test_a_model_on_meta_is_filled_with_the_original_state_after_the_transform(ranks: RankPools) -> None:
    want = one_block()
    for rank, (on_meta, logits, gradients, odd) in enumerate(ranks(4).run(from_meta)):
        assert on_meta
        assert odd == []
        assert relative_error(logits, want.outputs[rank]) <= 1e-5
        assert_all_gradients_close(gradients, want.gradients)


def test_a_capture_leaves_nothing_on_the_model_and_no_second_copy_of_its_weights(ranks: RankPools) -> None:
    clean = {"attributes": [], "config": True, "implementation": True, "hooks": 0, "fake": [], "real": []}
    for found in ranks(4).run(left_behind):
        assert found == {"TinyMoE": clean, "Mixtral": clean}


def test_grouped_experts_zero_the_rows_behind_the_last_expert() -> None:
    experts = ep_fx.nn.GroupedExperts(16, 32, 4)
    y: Tensor = experts(torch.ones(6, 16), torch.tensor([2, 0, 1, 1]))
    assert y[4:].eq(0).all()
    assert y[:4].ne(0).any(1).all()
