"""What is computed from a rank's own experts leaves them through combine, or is refused at capture."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.models.hand_moe import HandExperts, HandMoE, hand_loss, tokens_for
from tests.oracle import assert_all_gradients_close, gradients_of


class Penalised(HandMoE):
    """Also returns a penalty on the experts' weights."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.experts.w.pow(2).sum()


class Penalty(HandMoE):
    """The same, computed behind the experts and through memory that is written in place."""

    def forward(self, x: Tensor) -> Any:
        total = torch.zeros(1)
        before = total.view(())
        total.add_(self.experts.w.norm())
        return super().forward(x), before + 1


class Counting(HandExperts):
    """Counts its rows in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        self.seen.add_(num_tokens_per_expert.sum())
        return super().forward(x, num_tokens_per_expert, scores)


def _counting() -> nn.Module:
    model = HandMoE()
    model.experts = Counting()
    return model


MODELS = {
    "penalty": (Penalised, "output 1"),
    "in place": (Penalty, "output 1"),
    "buffer": (_counting, "buffer 'experts_seen'"),
}


def refusal(rank: int, name: str) -> str:
    """What is said of the model."""
    module = ep_fx.transform(MODELS[name][0](), local_mesh(fsdp=1, ep=2))
    with pytest.raises(ValueError, match="a rank holds 2") as refused:
        module(tokens_for([0, 1, 2, 3]))
    return str(refused.value)


@pytest.mark.parametrize("name", MODELS)
def test_values_of_a_ranks_own_experts_are_refused(ranks: RankPools, name: str) -> None:
    for message in ranks(2).run(refusal, name):
        assert MODELS[name][1] in message
        assert "test_escapes.py:" in message


def penalised(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Penalty and gradients where the experts are whole on every rank, though sharded."""
    module = ep_fx.transform(Penalised(), local_mesh(fsdp=2, ep=1))
    y, penalty = module(tokens_for([0, 1, 2, 3]))
    (hand_loss(y) + penalty).backward()
    return penalty.detach(), {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[union-attr]


def test_a_penalty_is_right_where_every_rank_has_all_experts(ranks: RankPools) -> None:
    """Their weights are then read outside the region too, and freed after the last of these readers."""
    eager = Penalised()
    y, want = eager(tokens_for([0, 1, 2, 3]))
    (hand_loss(y) + want).backward()
    for penalty, gradients in ranks(2).run(penalised):
        assert torch.equal(penalty, want)
        assert_all_gradients_close(gradients, gradients_of(eager))
