"""TinyMoE: a small language model of MoE blocks (d 16, h 32, 4 experts, top-2, SwiGLU, router in fp32), fixed seed."""
from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.moe import MoE, Scores, gathered_product, grouped_product


class SwiGLUExperts(nn.Module):
    """``(silu(x w1') * x w3') w2'`` for rows in expert order; w1 and w3 [E, h, d], w2 [E, d, h].

    Args:
        score: where scores that are passed are applied.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        score: Literal["before", "after"] = "after",
        grouped: bool = False,
    ) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden, dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden, dim) * dim**-0.5)
        self.score = score
        self.product = grouped_product if grouped else gathered_product

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        if scores is not None and self.score == "before":
            x = x * scores.unsqueeze(-1).to(x.dtype)
        gate = F.silu(self.product(x, self.w1.transpose(-2, -1), num_tokens_per_expert))
        up = self.product(x, self.w3.transpose(-2, -1), num_tokens_per_expert)
        y = self.product(gate * up, self.w2.transpose(-2, -1), num_tokens_per_expert)
        if scores is not None and self.score == "after":
            y = y * scores.unsqueeze(-1).to(y.dtype)
        return y


class SwiGLU(nn.Module):
    """One expert for all tokens."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    """Logits in fp32 whatever the dtype of the tokens and of the model (fp64 stays)."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(dtype), self.weight.to(dtype))


class Block(nn.Module):
    """``h + moe(norm(h))``"""

    def __init__(self, dim: int, moe: MoE) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.moe = moe

    def forward(self, h: Tensor) -> Tensor:
        return h + self.moe(self.norm(h))


class TinyMoE(nn.Module):
    """Embedding, blocks, norm, head: token ids [B, S] to logits [B, S, vocabulary].

    Args:
        blocks, dim, hidden, num_experts, top_k, vocabulary: sizes.
        shared: every block has a shared expert beside the routed ones.
        scores, score: who applies the routing scores, and where (see `MoE` and `SwiGLUExperts`).
        grouped: experts use torch's grouped kernel.
        tied: the head's weight is the embedding's.
        seed: seed of the weights; the global generator is left as it was.
    """

    def __init__(
        self,
        blocks: int = 2,
        dim: int = 16,
        hidden: int = 32,
        num_experts: int = 4,
        top_k: int = 2,
        vocabulary: int = 32,
        *,
        shared: bool = False,
        scores: Scores = "after",
        score: Literal["before", "after"] = "after",
        grouped: bool = False,
        tied: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, dim)
            self.blocks = nn.ModuleList(
                Block(
                    dim,
                    MoE(
                        Router(dim, num_experts),
                        SwiGLUExperts(num_experts, dim, hidden, score, grouped),
                        top_k,
                        scores,
                        SwiGLU(dim, hidden) if shared else None,
                    ),
                )
                for _ in range(blocks)
            )
            self.norm = nn.RMSNorm(dim)
            self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def token_ids(rank: int, batch: int = 2, length: int = 8, vocabulary: int = 32) -> Tensor:
    """The batch of one rank: [batch, length], different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy of each token given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
