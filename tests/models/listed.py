"""MoE blocks whose experts are modules in a ModuleList, run in a Python loop: each the way some people write it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Module):
    """SwiGLU with a bias at its end."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Listed(nn.Module):
    """What all blocks share: a router and a list of experts; ``forward([B, S, D])`` is the subclass's."""

    def __init__(self, dim: int = 16, hidden: int = 24, num_experts: int = 4, top_k: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.router = nn.Linear(dim, num_experts, bias=False)
            self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))
        self.num_experts, self.top_k = num_experts, top_k

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, K]."""
        weights, ids = self.router(tokens).softmax(-1).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True), ids


class MaskOfChoices(Listed):
    """One-hot choices by expert, every expert in turn, added up by index; returns the router's logits too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, dim = x.shape
        tokens = x.view(-1, dim)
        logits = self.router(tokens)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, ids = torch.topk(weights, self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        total = torch.zeros((batch * length, dim), dtype=tokens.dtype, device=tokens.device)
        choices = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):
            expert = self.experts[number]
            choice, rows = torch.where(choices[number])
            result = expert(tokens[rows]) * weights[rows, choice, None]
            total.index_add_(0, rows, result.to(tokens.dtype))
        return total.reshape(batch, length, dim), logits


class SkipIdle(Listed):
    """Experts without a token are passed over."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            hit = ids == number
            count = int(hit.sum())
            if count == 0:
                continue
            row, choice = hit.nonzero(as_tuple=True)
            y[row] += weights[row, choice].unsqueeze(-1) * expert(tokens[row])
        return y.view(x.shape)


class SplitSorted(Listed):
    """Rows sorted by expert and split by counts that the host reads; the weights come at the very end."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        x = x.reshape(-1, dim)
        weights, ids = self.route(x)
        order = ids.view(-1).argsort()
        counts = torch.bincount(ids.view(-1), minlength=len(self.experts))
        pieces = x[order // self.top_k].split(counts.tolist())
        parts = [expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)]
        joined = torch.cat(parts)
        back = torch.empty_like(joined)
        back[order] = joined
        return (back.view(-1, self.top_k, dim) * weights.unsqueeze(-1)).sum(1).view(batch, length, dim)


class OnlyHit(Listed):
    """Top-1, a loop over the experts that were hit, the weight before the expert, a new tensor at each turn."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, expert_of = self.router(tokens).softmax(-1).max(-1)
        y = torch.zeros_like(tokens)
        for number in torch.unique(expert_of).tolist():
            rows = (expert_of == number).nonzero().squeeze(-1)
            y = y.index_add(0, rows, self.experts[number](tokens[rows] * weight[rows, None]))
        return y.reshape(x.shape)


class TwoWays(Listed):
    """One loop in train mode, another in eval mode in a method of its own without gradients; a shared expert."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.shared = Expert(self.router.in_features, 8)

    def forward(self, x: Tensor) -> Tensor:
        own, shape = x, x.shape
        weights, ids = self.route(x)
        x = x.reshape(-1, shape[-1])
        if self.training:
            flat = ids.view(-1)
            x = x.repeat_interleave(self.top_k, dim=0)
            y = torch.empty_like(x)
            for number, expert in enumerate(self.experts):
                y[flat == number] = expert(x[flat == number])
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(-2)
        else:
            y = self.answer(x, ids.view(-1, self.top_k), weights.view(-1, self.top_k)).view(shape)
        return y + self.shared(own)

    @torch.no_grad()
    def answer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, D] without gradients."""
        y = torch.zeros_like(x)
        for number in range(len(self.experts)):
            row, choice = (ids == number).nonzero(as_tuple=True)
            if row.numel():
                y.index_add_(0, row, self.experts[number](x[row]) * weights[row, choice, None])
        return y


class DenseWeights(Listed):
    """Weights of all experts [T, E], zero where an expert was not chosen; the result is added to the input."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        all_weights = torch.zeros(*x.shape[:-1], self.num_experts, dtype=x.dtype).scatter(-1, ids, weights)
        y = x
        for number, expert in enumerate(self.experts):
            chosen = all_weights[..., number] > 0
            if chosen.any():
                result = y[chosen] + all_weights[..., number][chosen].unsqueeze(-1) * expert(x[chosen])
                y = y.masked_scatter(chosen.unsqueeze(-1).expand_as(y), result)
        return y


PROVABLE: tuple[type[Listed], ...] = (MaskOfChoices, SkipIdle, SplitSorted, OnlyHit, TwoWays, DenseWeights)


class Mixture(Listed):
    """No MoE layer: every expert sees every token."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))  # type: ignore[return-value]


class Capacity(Listed):
    """An expert drops what comes after its first 16 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = (ids == number).nonzero(as_tuple=True)
            row, choice = row[:16], choice[:16]
            y[row] += weights[row, choice].unsqueeze(-1) * expert(tokens[row])
        return y.view(x.shape)


class Detached(SkipIdle):
    """The values of an MoE layer, and not its gradients."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = (ids == number).nonzero(as_tuple=True)
            y[row] += weights[row, choice].detach().unsqueeze(-1) * expert(tokens[row])
        return y.view(x.shape)


class Counting(Listed):
    """The loop also counts, in a buffer, how many tokens an expert had."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.register_buffer("load", torch.zeros(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, choice = (ids == number).nonzero(as_tuple=True)
            self.load[number] += row.numel()
            y[row] += weights[row, choice].unsqueeze(-1) * expert(tokens[row])
        return y.view(x.shape)


class Neighbours(Expert):
    """Not row by row: an expert sees the mean of its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(0, keepdim=True))


class OfNeighbours(SkipIdle):
    """SkipIdle with such experts."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.experts = nn.ModuleList(Neighbours(16, 24) for _ in range(self.num_experts))


class Unequal(SkipIdle):
    """One expert is wider than the others."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.experts[1] = Expert(16, 32)


REFUSED: dict[type[Listed], str] = {
    Mixture: "no ids [T, K] and weights [T, K]",
    Capacity: "no ids [T, K] and weights [T, K]",
    Detached: "the gradient of the input differs",
    Counting: "no ids [T, K] and weights [T, K]",
    OfNeighbours: "not row by row",
    Unequal: "experts 0 and 1 are different modules",
}
"""Blocks that must not be taken for MoE layers, and a part of the reason."""


class InModel(nn.Module):
    """Two layers around blocks of one class: tokens [B, S, D] to [B, S, D]."""

    def __init__(self, block: type[Listed], blocks: int = 1, **sizes: Any) -> None:
        super().__init__()
        dim = sizes.get("dim", 16)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.inlet, self.outlet = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block(seed=seed, **sizes) for seed in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            y = block(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return self.outlet(x)


def tokens_of(rank: int, batch: int = 2, length: int = 6, dim: int = 16) -> Tensor:
    """The batch of one rank: [batch, length, dim], different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(3000 + rank)
    return torch.randn(batch, length, dim, generator=generator)
