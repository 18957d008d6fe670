"""A small MoE model as a project has it: two layers of norm, router and experts, and a head."""
from __future__ import annotations

import torch
from torch import Tensor, nn

import ep_fx

DIM, EXPERTS, TOP_K, VOCABULARY = 16, 4, 2, 32


class Layer(nn.Module):
    """``x + experts(norm(x))``, each token through its two best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = ep_fx.nn.GroupedExperts(dim=DIM, hidden=2 * DIM, num_experts=EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, ids = self.router(h).softmax(-1).topk(TOP_K)
        order = ids.flatten().argsort(stable=True)
        counts = (ids.flatten() == torch.arange(EXPERTS, device=x.device).unsqueeze(1)).sum(1)
        rows = self.experts(h[order // TOP_K], counts)
        y = torch.zeros_like(rows).index_copy(0, order, rows).view(*ids.shape, DIM)
        return x + (y * weights.unsqueeze(-1)).sum(1)


class Model(nn.Module):
    """Token ids [T] to logits [T, vocabulary], the same weights in every process."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, DIM)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(DIM, VOCABULARY, bias=False)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(rank: int = 0, length: int = 6) -> Tensor:
    """Token ids of one rank: [length]."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCABULARY, (length,), generator=generator)
