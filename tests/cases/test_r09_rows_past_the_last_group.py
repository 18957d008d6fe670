"""R09, rows past the last group's offset come back uninitialised.

Sources: pytorch/torchtitan#1237, huggingface/transformers PR#48205 and PR#45473, pytorch/pytorch#193633 and #172439.
Padding rows of a grouped product hold whatever was in that memory; the first step is clean and the second is NaN,
because 0 times Inf passes through the activation's backward. Experts here pad their rows themselves, with NaN, by
torch's own grouped product: in the graph padding must be exactly 0 in the result and in the gradient.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.tiny_moe import SwiGLUExperts, TinyMoE, next_token_loss, token_ids

PADDING = 8
STEPS = 5


class PaddedExperts(SwiGLUExperts):
    """SwiGLUExperts with a bias inside, on rows with `padding` rows of `filler` behind them, cut off at the end.

    The padding takes the last expert's bias, whose gradient so sums over padding rows too: what these hold, shows.
    """

    def __init__(self, padding: int, filler: float) -> None:
        super().__init__(4, 16, 32)
        self.bias = nn.Parameter(torch.zeros(4, 32))
        self.padding, self.filler = padding, filler

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        ends = num_tokens_per_expert.cumsum(0)
        padded = torch.cat((x, x.new_full((self.padding, x.shape[1]), self.filler)))
        last = num_tokens_per_expert.shape[0] - 1
        expert_of_row = torch.searchsorted(ends, torch.arange(padded.shape[0]), right=True).clamp(max=last)
        offsets = ends.to(torch.int32)
        gate = F.silu(F.grouped_mm(padded, self.w1.mT, offs=offsets) + self.bias[expert_of_row])
        inner = gate * F.grouped_mm(padded, self.w3.mT, offs=offsets)
        return F.grouped_mm(inner, self.w2.mT, offs=offsets)[: x.shape[0]]


def padded_model(padding: int, filler: float) -> TinyMoE:
    """TinyMoE whose experts pad."""
    model = TinyMoE(blocks=1, grouped=True)
    experts = PaddedExperts(padding, filler)
    experts.load_state_dict(model.blocks[0].moe.experts.state_dict(), strict=False)
    model.blocks[0].moe.experts = experts
    return model


def five_steps(rank: int, padding: int, filler: float) -> tuple[list[float], list[Tensor]]:
    """Losses, and the parameters after the last step."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN
    try:
        module = ep_fx.transform(padded_model(padding, filler), local_mesh(**M4))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        losses = []
        for _ in range(STEPS):
            loss = next_token_loss(module(token_ids(rank)), token_ids(rank))
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad.to_local().isfinite().all() for p in module.parameters())  # type: ignore[union-attr]
            optimizer.step()
        return losses, [p.to_local().detach() for p in module.parameters()]  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)


def test_r09_padding_is_zero_in_the_product_and_in_the_gradient_of_its_rows() -> None:
    x = torch.full((8, 16), float("nan"))
    x[:4] = 1
    x.requires_grad_()
    weight = torch.ones(2, 16, 16, requires_grad=True)
    y = torch.ops.ep_fx.grouped_mm(x, weight, torch.tensor([2, 2]), None, False)
    y.backward(torch.full_like(y, float("inf")))
    assert x.grad is not None
    assert y[4:].eq(0).all()
    assert x.grad[4:].eq(0).all()


def test_r09_five_steps_with_padding_equal_five_without(ranks: RankPools) -> None:
    plain = ranks(4).run(five_steps, 0, 0.0)
    for filler in (float("nan"), float("inf")):
        padded = ranks(4).run(five_steps, PADDING, filler)
        for (losses, weights), (want_losses, want_weights) in zip(padded, plain, strict=True):
            assert losses == want_losses
            assert losses[-1] < losses[0]
            assert all(torch.equal(got, want) for got, want in zip(weights, want_weights, strict=True))
