"""R28, an adapter that all experts share, under the experts' module.

Sources: NVIDIA-NeMo/Megatron-Bridge PR#6009 and #5634, PrimeIntellect-ai/prime-rl PR#2035.
Because it lives there it is taken for an expert's parameter and its gradient is summed over the expert's shards only:
after a few steps the ranks of an EP group hold different copies. Here only parameters [E, ...] of the experts' own
module are the experts'; an adapter in a module of its own is not, even where its sizes look alike, and one that stands
among the experts' parameters is refused by name.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.hand_moe import HandExperts, HandMoE
from tests.oracle import relative_error

STEPS = 5


class Adapter(nn.Module):
    """``x @ down @ up``, `down` [8, 1] and `up` [1, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.linspace(-1, 1, 8).view(8, 1))
        self.up = nn.Parameter(torch.linspace(0.5, -0.7, 8).view(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down @ self.up


class Adapted(HandExperts):
    """``x @ w[e] + adapter (x)``, base frozen.

    Args:
        own: the adapter is a module of its own; else its parameters stand beside `w`.
    """

    def __init__(self, num_experts: int, own: bool) -> None:
        super().__init__(num_experts)
        self.w.requires_grad_(False)
        self.own = own
        if own:
            self.adapter = Adapter()
        else:
            self.down, self.up = Adapter().parameters()

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        y = super().forward(x, num_tokens_per_expert)
        return y + (self.adapter(x) if self.own else x @ self.down @ self.up)


def _model(num_experts: int, own: bool = True) -> HandMoE:
    model = HandMoE(num_experts)
    model.experts = Adapted(num_experts, own)
    return model


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randn(rank + 3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank: int, num_experts: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The adapter after five steps, as this rank has it, and its errors against the oracle's."""
    module, eager = ep_fx.transform(_model(num_experts), local_mesh(**M4)), _model(num_experts)
    ours, theirs = (
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02) for model in (module, eager)
    )
    for step in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        module(_tokens(rank, step)).square().mean().backward()
        for r in range(4):
            (eager(_tokens(r, step)).square().mean() / 4).backward()
        ours.step()
        theirs.step()
    state = module.full_state_dict()
    adapter = {name: value for name, value in state.items() if "adapter" in name}
    return adapter, {name: relative_error(value, eager.state_dict()[name]) for name, value in adapter.items()}


@pytest.mark.parametrize(
    "num_experts", [pytest.param(4, marks=pytest.mark.slow), 8], ids=["4 experts", "as many experts as features"]
)
def test_r28_an_adapter_of_all_experts_stays_one_on_all_ranks(ranks: RankPools, num_experts: int) -> None:
    runs = ranks(4).run(trained, num_experts)
    for adapter, errors in runs:
        assert len(errors) == 2
        assert max(errors.values()) <= 1e-5
        assert all(torch.equal(value, runs[0][0][name]) for name, value in adapter.items())
        assert relative_error(adapter["experts.adapter.up"], Adapter().up) > 1e-3, "it must have moved"


def refused(rank: int) -> str:
    """What is said where the adapter's parameters stand among the experts'."""
    with pytest.raises(ValueError, match="no MoE experts were recognised") as caught:
        ep_fx.transform(_model(4, own=False), local_mesh(**M4))
    return str(caught.value)


def test_r28_an_adapter_among_the_experts_own_parameters_is_refused_by_name(ranks: RankPools) -> None:
    for message in ranks(4).run(refused):
        assert "experts (Adapted, " in message
        assert "test_r28_shared_adapter.py:" in message
        assert "w [4, 8, 8], down [8, 1], up [1, 8]" in message
