"""MoE blocks with guards: MoE layers on ordinary tokens, and something else for values or modes that are seldom met."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch import is_grad_enabled as recording
from torch.profiler import record_function

from tests.models.listed import Listed, SkipIdle


class Guarded(Listed):
    """A plain loop, with places for guards."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(tokens).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where((ids == number) & self.kept(tokens, weights))
            y.index_add_(0, row, weights[row, choice, None] * self.answer(expert, tokens[row]))
        return y.view(x.shape)

    def kept(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Which choices [T, K] count."""
        return torch.ones_like(weights, dtype=torch.bool)

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        """[R, D] to [R, D]."""
        return expert(rows)


class Clamped(Guarded):
    """Keeps answers small."""

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows).clamp(-10, 10)


class ClampedInEval(Guarded):
    """The same in one mode only, and far out."""

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows) if self.training else expert(rows).clamp(-65504, 65504)


class ClampedTokens(Guarded):
    """Keeps tokens small."""

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows.clamp(-1000, 1000))


class Finite(Guarded):
    """Replaces what is not finite."""

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return torch.nan_to_num(expert(rows))


class NoPadding(Guarded):
    """Zero rows are not sent to experts."""

    def kept(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return tokens.abs().sum(-1, keepdim=True).expand_as(weights) > 0


class NoConstantRows(Guarded):
    """Rows that are constant are taken for padding."""

    def kept(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return (tokens != tokens[:, :1]).any(-1, keepdim=True).expand_as(weights)


class NoSmallWeights(Guarded):
    """Choices of a small weight are dropped."""

    least = 1e-3

    def kept(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return weights > self.least


class NoTinyWeights(NoSmallWeights):
    """The same, far out."""

    least = 1e-6


class Fp16Guard(Guarded):
    """Clamps infinities, in fp16 only."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.half()

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        y = expert(rows)
        return y.clamp(-65504, 65504) if y.dtype == torch.float16 else y


class HalvedWithoutGrad(Guarded):
    """A method of its own asks whether autograd records."""

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows) if recording() else expert(rows) / 2


class HalvedInInference(Guarded):
    """A method of its own asks for inference mode."""

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows) / 2 if torch.is_inference_mode_enabled() else expert(rows)


class AutocastInside(Listed):
    """Each expert under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(ids == number)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                answer = expert(tokens[row])
            y.index_add_(0, row, weights[row, choice, None] * answer.to(y.dtype))
        return y.view(x.shape)


class AutocastInMethod(Guarded):
    """The same in a method that the loop calls, where the text of the loop tells nothing."""

    def answer(self, expert: nn.Module, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return expert(rows).to(rows.dtype)


class AutocastAround(Listed):
    """The whole loop under autocast, where the weights have been made before it."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for number, expert in enumerate(self.experts):
                row, choice = torch.where(ids == number)
                y.index_add_(0, row, weights[row, choice, None] * expert(tokens[row]).to(y.dtype))
        return y.view(x.shape)


class AutocastMethod(SkipIdle):
    """The whole method under autocast."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(ids == number)
            y[row] += weights[row, choice, None] * expert(tokens[row])
        return y.view(x.shape)


class AsksForGrad(Listed):
    """The loop asks whether autograd records, under another name."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(ids == number)
            if recording():
                y.index_add_(0, row, weights[row, choice, None] * expert(tokens[row]))
            else:
                y.index_add_(0, row, weights[row, choice, None] * expert(tokens[row]))
        return y.view(x.shape)


class AsksForAutocast(Listed):
    """The loop asks for autocast."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(ids == number)
            rows = tokens[row].bfloat16().to(y.dtype) if torch.is_autocast_enabled("cpu") else tokens[row]
            y.index_add_(0, row, weights[row, choice, None] * expert(rows))
        return y.view(x.shape)


GUARDED: dict[type[Listed], str] = {
    Clamped: "an MoE layer except for weights near zero or answers of experts up to 1e12",
    ClampedInEval: "an MoE layer except for weights near zero or answers of experts up to 1e12",
    ClampedTokens: "an MoE layer except for tokens that are zero, equal, constant, tiny or huge",
    Finite: "an MoE layer except for answers of experts that are not finite",
    NoPadding: "an MoE layer except for tokens that are zero, equal, constant, tiny or huge",
    NoConstantRows: "an MoE layer except for tokens that are zero, equal, constant, tiny or huge",
    NoSmallWeights: "an MoE layer except for weights near zero or answers of experts up to 1e12",
    NoTinyWeights: "an MoE layer except for weights near zero or answers of experts up to 1e12",
    Fp16Guard: "in torch.float16 output differs for answers of experts that are not finite",
    HalvedWithoutGrad: "an MoE layer except for runs without autograd",
    HalvedInInference: "taken as an MoE layer output differs for runs without autograd",
    AutocastInMethod: "an expert is called in other modes of torch (autocast, default dtype, ...) than its parent",
    AutocastInside: "with torch.autocast('cpu', dtype=torch.bfloat16) stands inside the loop over experts",
    AutocastAround: "with torch.autocast('cpu', dtype=torch.bfloat16) stands around the loop over experts",
    AutocastMethod: "experts under autocast are not recognised",
    AsksForGrad: "is_grad_enabled: the loop over experts sets or asks for a mode of torch",
    AsksForAutocast: "is_autocast_enabled: the loop over experts sets or asks for a mode of torch",
}
"""Blocks that must not be taken for MoE layers, and a part of the reason."""


class HarmlessContexts(Listed):
    """Contexts that change no number, in the loop; one that is kept, around the router."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(ids == number)
            with record_function("expert"), contextlib.nullcontext():
                y.index_add_(0, row, weights[row, choice, None] * expert(tokens[row]))
        return y.view(x.shape)


class NotCalledSelf(Listed):
    """The first argument has another name."""

    def forward(module, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = module.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(module.experts):
            row, choice = torch.where(ids == number)
            y.index_add_(0, row, weights[row, choice, None] * expert(tokens[row]))
        return y.view(x.shape)


class NoZeroTokens(SkipIdle):
    """Raises itself on tokens that are zero, and has nothing to show there."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 0).all(-1).any()):
            raise ValueError("a token is zero")
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(ids == number)
            y.index_add_(0, row, weights[row, choice, None] * expert(tokens[row]))
        return y.view(x.shape)


HARMLESS: tuple[type[Listed], ...] = (Guarded, HarmlessContexts, NotCalledSelf, NoZeroTokens)
"""Blocks that are MoE layers."""
