"""R38, sizes that the grouped kernel refuses.

Sources: pytorch/torchtitan#1651 and #3029 (comment), pytorch/pytorch PR#192497 and #152668.
torch's kernel wants rows of a multiple of 16 bytes, knows no fp64, and with no token at all behaves differently eager
and compiled. The same experts, transformed, must be right for d = 6, for token totals of 1, 7, 8, 9 and 0 (not a
multiple of anything), and in fp64, as an oracle needs it.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE
from tests.oracle import assert_all_gradients_close, oracle, relative_error

DIM = 6
TOTALS = (1, 7, 8, 9, 0)
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-12}


def model(dtype: torch.dtype, grouped: bool) -> HandMoE:
    """Top-2. Its experts call ``F.grouped_mm``, or one small product a row, which takes any size."""
    return HandMoE(dim=DIM, top_k=2, grouped=grouped).to(dtype)


def tokens(rank: int, total: int, dtype: torch.dtype) -> Tensor:
    """`total` tokens, [total, 6]."""
    return torch.randn(total, DIM, generator=torch.Generator().manual_seed(10 * total + rank)).to(dtype)


def loss_of(y: Tensor) -> Tensor:
    """Defined for no token, too."""
    return y.square().sum()


def totals_in_turn(rank: int, dtype: torch.dtype) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Output and whole gradients for each total."""
    module = ep_fx.transform(model(dtype, grouped=True), local_mesh(**M4))
    found = []
    for total in TOTALS:
        module.zero_grad()
        y = module(tokens(rank, total, dtype))
        loss_of(y).backward()
        found.append((y.detach(), {n: p.grad.full_tensor() for n, p in module.named_parameters()}))  # type: ignore[union-attr]
    return found


def test_r38_torch_refuses_these_sizes_itself() -> None:
    """Else nothing here is about a fallback."""
    for dtype in DTYPES:
        with pytest.raises((RuntimeError, ValueError)):
            model(dtype, grouped=True)(tokens(0, 7, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_r38_every_total_is_right_by_an_fp64_oracle(ranks: RankPools, dtype: torch.dtype) -> None:
    runs = ranks(4).run(totals_in_turn, dtype)
    for index, total in enumerate(TOTALS):
        batches = [(tokens(rank, total, dtype).double(),) for rank in range(4)]
        want = oracle(lambda: model(torch.float64, grouped=False), batches, loss_of)
        for run, expected in zip(runs, want.outputs, strict=True):
            y, gradients = run[index]
            assert (y.shape, y.dtype) == (expected.shape, dtype)
            assert relative_error(y, expected) <= DTYPES[dtype]
            assert_all_gradients_close(gradients, want.gradients, tol=DTYPES[dtype])
