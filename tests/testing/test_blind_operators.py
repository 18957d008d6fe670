"""The blind operators apply, change the copy that they were given, and leave the graph itself as it was."""
from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ep_fx
from ep_fx.graph import ParallelGraph, split
from ep_fx.testing import fake_world
from ep_fx.testing.mutate.base import Operator, operators
from tests.models.tiny_moe import TinyMoE

OPERATORS = operators(families="blind_")
SEEDS = (0, 1)


class Counting(nn.Module):
    """A model with dropout, an auxiliary output, and buffers that forward updates and reads."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(vocabulary))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.dropout(self.model(ids))
        self.seen.add_(ids.shape[0])
        self.mean.mul_(0.9).add_(logits.detach().mean((0, 1)))
        return logits - self.mean, (logits.softmax(-1) ** 2).mean()


@pytest.fixture(scope="module")
def graphs() -> Iterator[list[ParallelGraph]]:
    """A plain model, and one that is uneven and replicated, with shared experts, buffers, dropout, grouped products."""
    ids = torch.zeros(2, 6, dtype=torch.long)
    uneven = TinyMoE(dim=12, hidden=8, num_experts=6, vocabulary=31, shared=True, grouped=True, scores="keyword")
    with fake_world(4):
        yield [
            ep_fx.transform(model, init_device_mesh("cpu", sizes, mesh_dim_names=names), example_inputs=(ids,)).graph
            for model, sizes, names in (
                (TinyMoE(), (2, 2), ("fsdp", "ep")),
                (Counting(uneven, 31), (2, 1, 2), ("replicate", "fsdp", "ep")),
            )
        ]


def plain_text(graph: ParallelGraph) -> str:
    """Each node with all its arguments."""
    return "\n".join(str(node.format_node()) for node in graph)


def can_be_run(graph: ParallelGraph) -> None:
    """Both halves are graphs of their own: nobody reads what the other half has not handed over."""
    halves = split(graph)
    halves.forward.lint()
    assert halves.backward is not None
    halves.backward.lint()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_an_operator_edits_a_copy(operator: Operator, graphs: list[ParallelGraph]) -> None:
    texts = []
    for graph in graphs:
        before = plain_text(graph)
        for edited in filter(None, (operator(graph, random.Random(seed)) for seed in SEEDS)):
            texts.append(plain_text(edited))
            assert texts[-1] != before
            can_be_run(edited)
        assert plain_text(graph) == before
    assert texts, "applies to neither graph"


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_a_seed_names_the_place(operator: Operator, graphs: list[ParallelGraph]) -> None:
    one, other = operator(graphs[0], random.Random(1)), operator(graphs[0], random.Random(1))
    assert (one and plain_text(one)) == (other and plain_text(other))


def test_there_are_enough_and_each_says_what_is_wrong() -> None:
    assert len(OPERATORS) >= 60
    assert len({operator.sentence for operator in OPERATORS.values()}) == len(OPERATORS)
