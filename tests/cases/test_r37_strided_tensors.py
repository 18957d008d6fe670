"""R37, tensors that are not contiguous on their way into a collective.

Sources: pytorch/pytorch PR#141816 and #128066, NVIDIA/Megatron-LM#5337.
A strided argument is sent as if its memory were in order, or a copy of it is reduced and the original returned. The
graph is captured for contiguous inputs and incoming gradients; here everything that enters it is strided: inputs,
rows and counts for the experts, what these return, parameters, buffers, incoming gradients and those to be reduced.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE
from tests.oracle import assert_all_gradients_close, oracle, relative_error


def _numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "t": lambda rank: _numbers(rank, 8, 8).t(),
    "every second": lambda rank: _numbers(rank, 8, 16)[:, ::2],
    "expanded": lambda rank: _numbers(rank, 1, 8).expand(8, 8),
    "batches inside": lambda rank: _numbers(rank, 3, 5, 8).transpose(0, 1),
}


class StridedRows(HandMoE):
    """Rows, counts and results of the experts are strided."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        _, ids, number = self.route(tokens)
        order = ids.flatten().argsort(stable=True)
        counts = (ids.reshape(-1, 1) == torch.arange(number)).sum(0)
        rows = torch.stack((tokens[order], torch.zeros_like(tokens)), 2).flatten(1)[:, ::2]
        y = self.experts(rows, torch.stack((counts, counts), 1)[:, 0]).t().contiguous().t()
        return y[order.argsort()].view(x.shape)


class StridedState(nn.Module):
    """A buffer and a parameter whose memory is transposed; the output is transposed too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe, self.linear = HandMoE(), nn.Linear(8, 8)
        self.register_buffer("mask", torch.randn(8, 5).t())
        self.scale = nn.Parameter(torch.randn(8, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).reshape(-1, 1, 8) * (self.mask * self.scale).reshape(-1).view(1, 5, 8)
        return self.moe(rows.reshape(-1, 8)).view(-1, 5, 8).sum(1).t()


MODELS: dict[str, Callable[[], nn.Module]] = {"rows": StridedRows, "state": StridedState}


def strided_loss(y: Tensor) -> Tensor:
    """Its gradient arrives transposed, and is different for every element."""
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape[::-1]).permute(*reversed(range(y.dim())))
    return (y * weights).sum()


def run(rank: int, model: str, given: str) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Output, whole gradients, and whether the input is as it was."""
    module, x = ep_fx.transform(MODELS[model](), local_mesh(**M4)), INPUTS[given](rank)
    before = x.clone()
    y = module(x)
    strided_loss(y).backward()
    gradients = {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[union-attr]
    return y.detach(), gradients, torch.equal(x, before)


CASES = [
    ("rows", "t"), ("state", "batches inside"),
    *(pytest.param("rows", given, marks=pytest.mark.slow) for given in INPUTS if given != "t"),
    *(pytest.param("state", given, marks=pytest.mark.slow) for given in INPUTS if given != "batches inside"),
]


@pytest.mark.parametrize(("model", "given"), CASES)
def test_r37_strided_tensors_give_what_contiguous_ones_do(ranks: RankPools, model: str, given: str) -> None:
    want = oracle(MODELS[model], [(INPUTS[given](rank).contiguous(),) for rank in range(4)], strided_loss)
    for (y, gradients, unchanged), expected in zip(ranks(4).run(run, model, given), want.outputs, strict=True):
        assert relative_error(y, expected) <= 1e-5
        assert_all_gradients_close(gradients, want.gradients)
        assert unchanged
