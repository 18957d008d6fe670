"""R22, the train/eval flag is frozen at capture.

Sources: pytorch/pytorch#68190 and #151726.
``F.dropout(..., training=self.training)`` becomes a constant of the graph: after ``.eval()`` the output would still
vary, or after ``.train()`` it would not. Here each mode of the modules is a capture of its own, made at its first call,
in whichever order they come and for part of the model too.
"""
from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.tiny_moe import Router, TinyMoE, token_ids
from tests.oracle import relative_error


class JitteringRouter(Router):
    """Multiplies its tokens by noise around 1, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.5, 1.5)
        return super().forward(x)


class Dropping(TinyMoE):
    """TinyMoE with a router that jitters, and functional dropout where the router does not: each alone must be seen."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        weight = self.blocks[0].moe.router.weight
        self.blocks[0].moe.router = JitteringRouter(16, 4)
        self.blocks[0].moe.router.weight = weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(ids)
        return self.blocks[0](h), F.dropout(self.norm(h), 0.5, self.training)


class Modes(NamedTuple):
    """Args:
    eval_error: of the outputs of two calls in eval mode, the largest error against the original.
    varies: for each time in train mode, whether each output of two calls differs.
    captures: number of them.
    """

    eval_error: float
    varies: list[list[bool]]
    captures: int


def in_turn(rank: int, train_first: bool, part: str) -> Modes:
    """Train, eval, train, or eval, train, eval, of the submodule `part` (all of the model: "")."""
    eager, module = Dropping(), ep_fx.transform(Dropping(), local_mesh(**M4))
    ids, errors, varies = token_ids(rank), [0.0], []
    eager.get_submodule(part).eval()
    want = eager(ids)
    for train in (train_first, not train_first, train_first):
        module.get_submodule(part).train(train)
        first, second = module(ids), module(ids)
        if train:
            varies.append([not torch.equal(a, b) for a, b in zip(first, second, strict=True)])
        elif not part:
            errors += [relative_error(y, w) for got in (first, second) for y, w in zip(got, want, strict=True)]
        else:
            errors += [relative_error(first[0], want[0]), relative_error(second[0], want[0])]
    return Modes(max(errors), varies, len(module.programs))


@pytest.mark.parametrize(
    ("part", "train_first"),
    [("", False), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("", True), ("blocks.0.moe.router", False)))],
)
def test_r22_eval_is_the_originals_and_train_varies_in_either_order(
    ranks: RankPools, part: str, train_first: bool
) -> None:
    for found in ranks(4).run(in_turn, train_first, part):
        assert found.eval_error <= 1e-5
        assert found.varies == [[True, True]] * (2 if train_first else 1)
        assert found.captures == 2
