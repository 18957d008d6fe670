"""Models that branch on sizes: the branch is that of eager, at sizes of 1 and at those of the hints too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, fake_mesh, local_mesh

SHAPES = ((2, 7), (2, 1), (1, 7), (1, 1), (3, 3), (2, 5), (4, 4), (0, 3))
BRANCHES: dict[str, Callable[[Tensor], float]] = {
    "one position": lambda x: 2.0 if x.shape[1] == 1 else 1.0,
    "one sample": lambda x: 2.0 if x.shape[0] < 2 else 1.0,
    "one token": lambda x: 2.0 if x.shape[0] * x.shape[1] == 1 else 1.0,
    "two samples": lambda x: 2.0 if x.shape[0] == 2 else 1.0,
    "three samples, as the first hint": lambda x: 2.0 if x.shape[0] == 3 else 1.0,
    "five positions, as the second hint": lambda x: 2.0 if x.shape[1] == 5 else 1.0,
    "square": lambda x: 2.0 if x.shape[0] == x.shape[1] else 1.0,
    "degrees of freedom": lambda x: 1.0 / max(x.shape[1] - 1, 1),
}


class Branching(nn.Module):
    """Scales what a layer gives by a number that depends on the shape."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), BRANCHES[name]
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x)) * (self.scale(x) if x.numel() else 1.0)


def _wrong(rank: int, name: str) -> list[tuple[int, ...]]:
    module, eager = ep_fx.transform(Branching(name), local_mesh(fsdp=1), plan={}), Branching(name)
    wrong = []
    for shape in SHAPES:
        x = torch.rand(*shape, 4)
        if not torch.equal(module(x), eager(x)):
            wrong.append(shape)
    return wrong


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_sizes_is_that_of_eager(ranks: RankPools, name: str) -> None:
    assert ranks(1).run(_wrong, name) == [[]]


class Counting(nn.Module):
    """Counts of ids by bincount, as a router makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids, minlength=4) * self.weight


def _counts(rank: int) -> tuple[list[float], str]:
    module = ep_fx.transform(Counting(), local_mesh(fsdp=1), plan={})
    counts: list[float] = module(torch.tensor([0, 2, 2, 3, 2])).tolist()
    with pytest.raises(RuntimeError) as refused:
        module(torch.tensor([0, 4, 2, 3, 2]))
    return counts, str(refused.value)


def test_bincount_with_a_minlength_has_that_length(ranks: RankPools) -> None:
    ((counts, refused),) = ranks(1).run(_counts)
    assert counts == [1.0, 0.0, 3.0, 1.0]
    assert "out of bounds" in refused


def test_a_size_of_one_is_a_constant_and_other_sizes_are_free() -> None:
    with fake_mesh(fsdp=2) as mesh:
        module = ep_fx.transform(Branching("one sample"), mesh, plan={})
        for shape in SHAPES[:2] * 2:
            module.prepare(torch.rand(*shape, 4))
        assert len(module.programs) == 2
