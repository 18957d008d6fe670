"""The models that the suite shares: right by hand, the same however they are written, the same on every rank."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hand_moe import HandMoE, hand_gradient, hand_loss, hand_shares, tokens_for
from tests.models.hf import ARCHITECTURES, hf_ids, tiny_hf
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, gradients_of, oracle

RANKS = range(4)
IDS = [(token_ids(rank),) for rank in RANKS]


@pytest.mark.parametrize(
    ("routings", "shares"),
    [
        ([[0, 1, 2, 3]] * 4, [0.25] * 4),
        ([[0, 0, 0, 0], [0, 0, 1, 1]] * 2, [0.75, 0.25, 0, 0]),
        ([[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]], [0.520833, 0.270833, 0.145833, 0.0625]),
    ],
)
def test_hand_moe_gives_the_outputs_and_gradients_that_are_known_by_hand(
    routings: list[list[int]], shares: list[float]
) -> None:
    result = oracle(HandMoE, [(tokens_for(routing),) for routing in routings], hand_loss)
    assert [output.sum(-1).tolist() for output in result.outputs] == [[e + 1.0 for e in r] for r in routings]
    assert hand_shares(routings) == pytest.approx(shares, abs=1e-6)
    assert_all_gradients_close(
        result.gradients,
        {"experts.w": hand_gradient(hand_shares(routings)), "router.weight": torch.zeros(4, 8)},
    )


@pytest.mark.parametrize(
    "options",
    [{"scores": "positional"}, {"scores": "keyword"}, {"grouped": True}],
    ids=["positional", "keyword", "grouped"],
)
def test_ways_of_writing_tiny_moe_agree(options: dict[str, Any]) -> None:
    plain = oracle(TinyMoE, IDS, next_token_loss, IDS)
    assert_all_gradients_close(oracle(lambda: TinyMoE(**options), IDS, next_token_loss, IDS).gradients, plain.gradients)


def test_scores_before_and_after_the_experts_are_different_models() -> None:
    before = TinyMoE(scores="keyword", score="before")(token_ids(0))
    assert not torch.allclose(before, TinyMoE(scores="keyword")(token_ids(0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tiny_moe_runs_in_other_dtypes(dtype: torch.dtype) -> None:
    assert TinyMoE(shared=True).to(dtype)(token_ids(0)).dtype is dtype


def test_every_build_has_the_same_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    for make in (TinyMoE, lambda: tiny_hf("mixtral")):
        first, second = make().state_dict(), make().state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_hugging_face_models_give_every_parameter_a_gradient(arch: str) -> None:
    model = tiny_hf(arch)
    assert model.training
    model(input_ids=hf_ids(0), labels=hf_ids(0)).loss.backward()
    dead = [name for name, gradient in gradients_of(model).items() if not gradient.any()]
    assert dead == []


def test_no_model_knows_ep_fx() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        assert re.search(r"^(from|import) ep_fx", path.read_text(), re.MULTILINE) is None, path.name
