"""An MoE block as an ordinary user writes it: route, sort by expert, run the experts, unsort, weigh.

No import from ep_fx. The experts take rows in expert order: ``experts(x, num_tokens_per_expert, scores=None)``.
"""
from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Scores = Literal["after", "positional", "keyword"]


def gathered_product(x: Tensor, weight: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """``x[i] @ weight[expert of row i]`` by one small product a row: any dtype, size and number of rows."""
    ends = num_tokens_per_expert.cumsum(0)
    expert_of_row = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    return torch.bmm(x.unsqueeze(1), weight[expert_of_row]).squeeze(1)


def grouped_product(x: Tensor, weight: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """The same by torch's grouped kernel (sizes multiple of 16 bytes, no fp64)."""
    return F.grouped_mm(x, weight, offs=num_tokens_per_expert.cumsum(0).to(torch.int32))


class MoE(nn.Module):
    """Sends each token to its `top_k` experts.

    Args:
        router: tokens [T, d] to logits [T, E].
        experts: called with rows in expert order.
        top_k: experts per token; their scores are renormalised to sum 1.
        scores: who applies the scores: this block after the experts, or the experts, which get them by position or
            by keyword.
        shared: an expert that every token visits.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module,
        top_k: int,
        scores: Scores = "after",
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.top_k, self.scores = top_k, scores

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        """Scores [T, k], expert ids [T, k] and the number of experts."""
        probabilities = self.router(tokens).softmax(-1)
        scores, ids = probabilities.topk(self.top_k)
        return scores / scores.sum(-1, keepdim=True), ids, probabilities.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, ids, num_experts = self.route(tokens)
        order = ids.flatten().argsort(stable=True)
        counts = (ids.reshape(-1, 1) == torch.arange(num_experts, device=ids.device)).sum(0)
        rows = tokens[order // self.top_k]
        if self.scores == "positional":
            rows = self.experts(rows, counts, scores.flatten()[order])
        elif self.scores == "keyword":
            rows = self.experts(rows, counts, scores=scores.flatten()[order])
        else:
            rows = self.experts(rows, counts)
        y = rows[order.argsort()].view(-1, self.top_k, x.shape[-1])
        if self.scores == "after":
            y = y * scores.unsqueeze(-1)
        y = y.sum(1).to(x.dtype)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view(x.shape)
