"""Eager styles on an npu mesh: torch_npu's kernels below autograd, gradients as of the whole layer in one process."""
from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx.nn import GroupedExperts
from ep_fx.ops.library import KERNELS, use_kernels
from ep_fx.testing.npu import recorded
from ep_fx.testing.ranks import RankPool, RankPools
from tests.oracle import assert_all_gradients_close, oracle, relative_error

ops = torch.ops.ep_fx
DIM, HIDDEN, EXPERTS, TOP_K = 16, 24, 4, 2
TOKENS = (9, 0, 4, 1)
ROUTING = ("npu_moe_token_permute", "npu_moe_token_permute_grad_v2", "npu_moe_token_unpermute",
           "npu_moe_token_unpermute_grad_v2")  # fmt: skip


class Layer(nn.Module):
    """Router, permute, experts, unpermute; every fifth token's second choice is no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = GroupedExperts(DIM, HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K, -1)
        ids = torch.cat((ids[:, :1], ids[:, 1:].masked_fill(self._skipped(x), EXPERTS)), 1)
        rows, counts, order = ops.permute(x, ids, EXPERTS)
        y: Tensor = ops.unpermute(self.experts(rows, counts), order, weights)
        return y

    def _skipped(self, x: Tensor) -> Tensor:
        return (torch.arange(x.shape[0], device=x.device) % 5 == 4).unsqueeze(1)


def layer() -> Layer:
    """The same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Layer()


def tokens(rank: int) -> Tensor:
    """``[n, 16]``; rank 1 has none."""
    return torch.randn(TOKENS[rank], DIM, generator=torch.Generator().manual_seed(rank))


def loss_of(y: Tensor) -> Tensor:
    """Defined for no token, too."""
    return y.square().sum()


class Run(NamedTuple):
    """What one rank saw."""

    y: Tensor
    gradients: dict[str, Tensor]
    calls: Counter[str]


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()


def _styled(rank: int, ep: int) -> Run:
    module = layer().to("npu")
    ep_fx.ExpertParallel().apply(module, init_device_mesh("npu", (ep,), mesh_dim_names=("ep",)))
    with recorded() as calls:
        y = module(tokens(rank).to("npu").requires_grad_())
        loss_of(y).backward()
    return Run(y.detach().cpu(), {n: _whole(p.grad) for n, p in module.named_parameters()}, calls)


@pytest.mark.parametrize("ep", [2, 4])
def test_expert_parallel_has_the_gradients_of_the_whole_layer(ranks: RankPools, ep: int) -> None:
    runs = ranks(ep, "npu").run(_styled, ep)
    want = oracle(layer, [(tokens(rank),) for rank in range(ep)], loss_of)
    for rank, (run, y) in enumerate(zip(runs, want.outputs, strict=True)):
        assert relative_error(run.y, y) <= 1e-5
        assert set(run.gradients) == set(want.gradients)
        assert_all_gradients_close(run.gradients, want.gradients, tol=1e-5)
        assert "aten::_grouped_mm" not in run.calls
        if rank == 0:
            assert run.calls["npu::npu_grouped_matmul"] == 9  # three products and their gradients
            assert {f"npu::{name}" for name in ROUTING} <= set(run.calls)
        if TOKENS[rank] == 0:
            assert not run.calls["npu::npu_moe_token_permute"]  # empty input needs no kernel


def _compared(rank: int, name: str, args: tuple[Any, ...], on_npu: tuple[str, ...]) -> None:
    use_kernels("npu")
    want = KERNELS[name](*args)
    moved = [value.to("npu") if isinstance(value, Tensor) else value for value in args]
    with recorded() as calls, torch.no_grad():
        got = getattr(ops, name)(*moved)
    want, got = ((found,) if isinstance(found, Tensor) else found for found in (want, got))
    for expected, result in zip(want, got, strict=True):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert torch.allclose(result.cpu().double(), expected.double(), rtol=1e-5, atol=1e-6), name
    kernels = {f"npu::{kernel}" for kernel in on_npu}
    assert {called for called in calls if called.startswith("npu::")} == kernels


IDS = torch.tensor([[0, 3], [3, 1], [4, 0], [2, 4], [1, 1]])
ORDER = torch.argsort(IDS.reshape(-1), stable=True)
COUNTS = torch.tensor([2, 3, 1, 2])
X, ROWS, WEIGHTS = torch.randn(5, 8), torch.randn(10, 8), torch.rand(5, 2)
MATRICES, BIASES, INNER = torch.randn(4, 8, 6), torch.randn(4, 6), torch.randn(10, 6)
PRODUCT = ("npu_grouped_matmul",)
CALLS: dict[str, tuple[str, tuple[Any, ...], tuple[str, ...]]] = {
    "permute": ("permute", (X, IDS, 4), ("npu_moe_token_permute",)),
    "permute backward": ("permute_backward", (ROWS, ORDER, 5, 2), ("npu_moe_token_permute_grad_v2",)),
    "unpermute": ("unpermute", (ROWS, ORDER, WEIGHTS), ("npu_moe_token_unpermute",)),
    "unpermute backward": ("unpermute_backward", (X, ROWS, ORDER, WEIGHTS), ("npu_moe_token_unpermute_grad_v2",)),
    "regroup": ("regroup", (ROWS, ORDER), ("npu_moe_token_unpermute",)),
    "regroup scores": ("regroup", (ROWS[:, 0], ORDER), ("npu_moe_token_unpermute",)),
    "ungroup": ("ungroup", (ROWS, ORDER), ("npu_moe_token_unpermute_grad_v2",)),
    "product": ("grouped_mm", (ROWS, MATRICES, COUNTS, None, False), PRODUCT),
    "product with biases": ("grouped_mm", (ROWS, MATRICES, COUNTS, BIASES, False), PRODUCT),
    "transposed": ("grouped_mm", (INNER, MATRICES, COUNTS, None, True), PRODUCT),
    "product backward": ("grouped_mm_backward", (INNER, ROWS, MATRICES, COUNTS, True, False), PRODUCT),
    "transposed backward": ("grouped_mm_backward", (ROWS, INNER, MATRICES, COUNTS, False, True), PRODUCT),
    "no rows": ("grouped_mm", (ROWS[:0], MATRICES, COUNTS * 0, None, False), ()),
    "float64": ("grouped_mm", (ROWS.double(), MATRICES.double(), COUNTS, None, False), ()),
    "float64 permute": ("permute", (X.double(), IDS, 4), ()),
    "integers": ("regroup", (torch.arange(10), ORDER), ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_keep_their_meaning(npu_rank: RankPool, name: str) -> None:
    """And what a kernel does not take is computed as before."""
    npu_rank.run(_compared, *CALLS[name])


def _garbage_behind_the_last_expert(rank: int) -> None:
    """Rows that nobody counts may hold anything."""
    use_kernels("npu")
    x = ROWS.clone()
    x[8:] = torch.nan
    x, weight = x.to("npu").requires_grad_(), MATRICES.to("npu").requires_grad_()
    y = ops.grouped_mm(x, weight, COUNTS.to("npu"), None, False)
    y.sum().backward()
    assert y[8:].cpu().eq(0).all()
    assert x.grad is not None
    assert x.grad[8:].cpu().eq(0).all()
    assert weight.grad is not None
    assert weight.grad.cpu().isfinite().all()


def test_rows_of_no_expert_are_zero_and_touch_nothing(npu_rank: RankPool) -> None:
    npu_rank.run(_garbage_behind_the_last_expert)
