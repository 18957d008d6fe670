"""Models that the tests of the command line name as ``tests.cli.models:NAME``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.tiny_moe import TinyMoE


class Branching(nn.Module):
    """Its forward branches on a value, so no graph can carry it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if (x * self.weight).sum() > 0 else x


def tiny() -> tuple[nn.Module, tuple[Any, ...]]:
    return TinyMoE(blocks=1), (torch.zeros(2, 6, dtype=torch.long),)


def tiny_keywords() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return TinyMoE(blocks=1), (), {"ids": torch.zeros(2, 6, dtype=torch.long)}


def alone() -> nn.Module:
    return TinyMoE(blocks=1)


class Attending(nn.Module):
    """Attention over the embeddings of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        heads = self.blocks[0](x).unflatten(-1, (2, 8)).transpose(1, 2)
        answer = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + answer.transpose(1, 2).flatten(2)


def attending() -> tuple[nn.Module, tuple[Any, ...]]:
    return Attending(), (torch.zeros(2, 6, dtype=torch.long),)


def branching() -> tuple[nn.Module, tuple[Any, ...]]:
    return Branching(), (torch.ones(4),)


def floats() -> nn.Module:
    """Token ids do not fit it."""
    return nn.Linear(4, 4)


def number() -> int:
    return 7


def leaving() -> nn.Module:
    raise SystemExit(0)


def raising() -> nn.Module:
    raise RuntimeError("no such checkpoint")
