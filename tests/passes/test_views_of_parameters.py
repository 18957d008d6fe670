"""A view of a parameter whose sizes come from the batch is computed again in backward, like any other view."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.models.hand_moe import HandMoE
from tests.oracle import relative_error


class Queried(nn.Module):
    """Attends to the tokens with one query of its own at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.linspace(-1, 1, 8))
        self.moe = HandMoE(grouped=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, 8] -> [B, S, 8]"""
        batch, length, dim = x.shape
        query = self.query.view(-1, dim).expand(batch, length, -1, -1)
        states = torch.stack([x, x.square()], dim=2)
        mixed = torch.matmul(torch.matmul(query, states.transpose(2, 3)).softmax(-1), states)[:, :, 0]
        return x + self.moe(mixed.flatten(0, 1)).view_as(x)


def train(rank: int) -> tuple[float, str]:
    """Relative error of the query's gradient, and the code of backward's gathers."""
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank))
    whole, module = Queried(), ep_fx.transform(Queried(), local_mesh(fsdp=2, ep=2))
    got, want = module(x), whole(x)
    assert_close(got, want)
    got.square().mean().backward()
    want.square().mean().backward()
    torch.distributed.all_reduce(whole.query.grad)
    gradient = module.get_parameter("query").grad.full_tensor()  # type: ignore[union-attr]
    return relative_error(gradient, whole.query.grad / 4), str(module.verify())


def test_a_view_with_sizes_of_the_batch_keeps_no_gathered_memory_alive(ranks: RankPools) -> None:
    for error, report in ranks(4).run(train):
        assert error <= 1e-5
        assert "broken" not in report.lower()
