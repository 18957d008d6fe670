"""The valid graphs that mutants are made of: meshes of two ranks in every role, every policy, and one mesh of four."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ep_fx.testing.mutate.subject import Batch, Subject, capture
from tests.models.hand_moe import HandMoE
from tests.models.hf import hf_ids, tiny_hf
from tests.models.tiny_moe import TinyMoE, token_ids

FSDP, EP, REPLICATE, TP = {"fsdp": 2}, {"ep": 2}, {"replicate": 2}, {"tp": 2}


class Counting(TinyMoE):
    """Counts its calls and tokens in buffers, in place."""

    def __init__(self) -> None:
        super().__init__(grouped=True)
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls.add_(1.0)
        self.tokens.add_(ids.numel())
        return super().forward(ids) * self.calls[0]


class Dropping(TinyMoE):
    """Drops part of what it embeds, and of what the last block gives."""

    def __init__(self) -> None:
        super().__init__(blocks=1)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.dropout(self.embedding(ids), 0.3, self.training)
        for block in self.blocks:
            h = block(h)
        return self.head(F.dropout(self.norm(h), 0.3, self.training))


def frozen() -> nn.Module:
    """Half of the experts' weights and one norm are not trained."""
    model = TinyMoE(shared=True)
    model.blocks[0].norm.weight.requires_grad_(False)
    for parameter in model.blocks[1].moe.experts.parameters():
        parameter.requires_grad_(False)
    return model


def _tokens(world: int, **sizes: int) -> list[list[Batch]]:
    return [[((token_ids(8 * step + rank, **sizes),), {}) for rank in range(world)] for step in range(2)]


def _shared_tokens(world: int) -> list[list[Batch]]:
    return [[((token_ids(8 * step),), {})] * world for step in range(2)]


def _ids(world: int) -> list[list[Batch]]:
    return [[((), {"input_ids": hf_ids(8 * step + rank)}) for rank in range(world)] for step in range(2)]


def _rows(world: int) -> list[list[Batch]]:
    def rows(seed: int) -> Tensor:
        return torch.randn(9 + seed % 3, 8, generator=torch.Generator().manual_seed(seed))

    return [[((rows(8 * step + rank),), {}) for rank in range(world)] for step in range(2)]


_One = tuple[Callable[[], nn.Module], Mapping[str, int], Callable[[int], list[list[Batch]]], dict[str, Any]]
_ALL: dict[str, _One] = {
    "tiny, fsdp": (lambda: TinyMoE(shared=True), FSDP, _tokens, {}),
    "tiny, ep": (lambda: TinyMoE(shared=True), EP, _tokens, {}),
    "tiny, ep, sum": (lambda: TinyMoE(blocks=1, tied=True), EP, _tokens, {"grad_reduce": "sum"}),
    "frozen, ep": (frozen, EP, _tokens, {}),
    "counting, fsdp": (Counting, FSDP, _tokens, {}),
    "dropout, fsdp": (Dropping, FSDP, _tokens, {}),
    "tiny, replicate": (TinyMoE, REPLICATE, _tokens, {}),
    "tiny, fsdp, early": (lambda: TinyMoE(grouped=True), FSDP, _tokens, {"expert_reshard": "early"}),
    "tiny, fsdp, kept": (TinyMoE, FSDP, _tokens, {"reshard_after_forward": False}),
    "uneven, fsdp": (
        lambda: TinyMoE(dim=15, hidden=9, num_experts=3, vocabulary=31), FSDP, lambda n: _tokens(n, vocabulary=31), {},
    ),
    "hand, ep": (lambda: HandMoE(top_k=2, scores="keyword"), EP, _rows, {}),
    "mixtral, ep": (lambda: tiny_hf("mixtral", num_hidden_layers=1), EP, _ids, {}),
    "qwen3, fsdp": (lambda: tiny_hf("qwen3_moe", num_hidden_layers=1), FSDP, _ids, {}),
    "tiny, tp": (lambda: TinyMoE(grouped=True, blocks=1), TP, _shared_tokens, {}),
    "tiny, ep x tp": (
        lambda: TinyMoE(grouped=True, scores="keyword", score="before"), {"ep": 2, "tp": 2},
        lambda world: [[rank[i // 2] for i in range(world)] for rank in _tokens(2)], {},
    ),
    "tiny, fsdp x ep": (lambda: TinyMoE(grouped=True), {"fsdp": 2, "ep": 2}, _tokens, {}),
}
NAMES = tuple(_ALL)
"""Names of all subjects; the last two are for four ranks."""


def world_of(name: str) -> int:
    """Number of ranks of a subject."""
    world = 1
    for size in _ALL[name][1].values():
        world *= size
    return world


def make(name: str) -> Subject:
    """The subject of that name, to be called inside `fake_world` of its size."""
    model, sizes, batches, options = _ALL[name]
    return capture(name, model(), sizes, batches(world_of(name)), **options)
