"""REG-1's eight cases on 4 ranks (dim 64, hidden 128, batch 4, seq 16): one table for every way to run an MoE layer.

    case = CASES["slice, k=1"];  model = make_model(case);  run = run_case(case, module, rank)   # on each rank
    assert_equals_oracle(case, [run of rank 0, ..., run of rank 3])                              # in the test

`run_case` takes the layer in whatever way it was made parallel (``ep_fx.transform(make_model(case), mesh)``, a style
applied), and calls ``module(x)``. Output, gradient of the input and the gradient of every parameter, router and shared
expert included, are compared with the full model in one process. Convention: mean over the data ranks of their losses.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models.moe import MoE
from tests.models.tiny_moe import Router, SwiGLU, SwiGLUExperts
from tests.oracle import assert_all_gradients_close, gradients_of, relative_error

DIM, HIDDEN, BATCH, SEQ = 64, 128, 4, 16
RANKS = 4
MESHES = ({"fsdp": 2, "ep": 2}, {"fsdp": 1, "ep": 4})
"""The meshes on which each case must hold."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One of the eight.

    Args:
        num_experts, top_k: of the layer.
        grouped: the experts use torch's grouped kernel.
        sliced: rank r holds the tokens ``[:, 4r : 4r + 4]``; else every rank holds all of them.
        shared: an expert that every token visits.
    """

    num_experts: int = 4
    top_k: int = 2
    grouped: bool = False
    sliced: bool = False
    shared: bool = False


CASES = {
    "4 experts": Case(),
    "8 experts": Case(num_experts=8),
    "grouped": Case(grouped=True),
    "slice": Case(sliced=True),
    "slice, 8 experts": Case(num_experts=8, sliced=True),
    "slice, grouped": Case(grouped=True, sliced=True),
    "slice, k=1": Case(top_k=1, sliced=True),
    "slice, shared": Case(shared=True, sliced=True),
}
"""The eight, by name."""


class Layer(MoE):
    """`MoE` whose scores are not renormalised: with k=1 they would all be 1, and the router would learn nothing."""

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        probabilities = self.router(tokens).softmax(-1)
        return *probabilities.topk(self.top_k), probabilities.shape[-1]


def make_model(case: Case) -> Layer:
    """The layer of `case`, with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.num_experts)
        return Layer(
            Router(DIM, case.num_experts),
            SwiGLUExperts(case.num_experts, DIM, HIDDEN, grouped=case.grouped),
            case.top_k,
            shared=SwiGLU(DIM, HIDDEN) if case.shared else None,
        )


def everything() -> tuple[Tensor, Tensor]:
    """All tokens and their targets, [4, 16, 64]."""
    generator = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, BATCH, SEQ, DIM, generator=generator)
    return x, target


def part_of(case: Case, rank: int, whole: Tensor) -> Tensor:
    """What `rank` holds of `whole`, [4, 16 or 4, 64]."""
    width = SEQ // RANKS
    return whole[:, width * rank : width * (rank + 1)] if case.sliced else whole


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens; no two tokens may change places unnoticed."""
    return F.mse_loss(y, target)


class Run(NamedTuple):
    """What one rank computed.

    Args:
        output: ``[4, S, 64]``, S its number of tokens in a sequence.
        input_gradient: of its own loss, with the shape of `output`.
        gradients: whole gradient of every trainable parameter, None where there is none.
    """

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor | None]


def run_case(case: Case, module: nn.Module, rank: int) -> Run:
    """Forward and backward of `module` on the tokens of `rank`."""
    return run_tokens(module, *(part_of(case, rank, whole).clone() for whole in everything()))


def run_tokens(
    module: nn.Module, tokens: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = loss_of
) -> Run:
    """Forward and backward of `module` on `tokens`, [B, S, 64]."""
    tokens.requires_grad_()
    y = module(tokens)
    loss(y, target).backward()
    assert tokens.grad is not None
    gradients = {name: _whole(p.grad) for name, p in module.named_parameters() if p.requires_grad}
    return Run(y.detach(), tokens.grad, gradients)


def _whole(gradient: Tensor | None) -> Tensor | None:
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    return None if gradient is None else gradient.clone()


@functools.cache
def expected(case: Case) -> Run:
    """The full model on all tokens, in this process."""
    model = make_model(case)
    tokens, target = everything()
    tokens.requires_grad_()
    y = model(tokens)
    loss_of(y, target).backward()
    assert tokens.grad is not None
    return Run(y.detach(), tokens.grad, dict(gradients_of(model)))


def assert_equals_oracle(case: Case, runs: list[Run]) -> None:
    """Every token of every rank, and every gradient on every rank, equals that of the full model.

    Raises:
        AssertionError: names the rank and what is wrong.
    """
    want = expected(case)
    gradients = {name: g for name, g in want.gradients.items() if g is not None}
    assert len(runs) == RANKS
    for rank, run in enumerate(runs):
        output = part_of(case, rank, want.output)
        assert run.output.shape == output.shape
        tokens = zip(run.output.reshape(-1, DIM), output.reshape(-1, DIM), strict=True)
        worst = max(relative_error(got, expect) for got, expect in tokens)
        assert worst <= TOLERANCE, f"rank {rank}: a token's output is wrong by {worst:.3g}"
        # Of the mean over ranks a rank's tokens get 1/RANKS of the gradient of its own loss, if they are its own.
        own = part_of(case, rank, want.input_gradient) * (RANKS if case.sliced else 1)
        error = relative_error(run.input_gradient, own)
        assert error <= TOLERANCE, f"rank {rank}: the gradient of the input is wrong by {error:.3g}"
        assert_all_gradients_close(run.gradients, gradients, tol=TOLERANCE)
