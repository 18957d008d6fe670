"""API-3: routing scores passed to the experts by position or by keyword, applied before or after them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, oracle, relative_error

WAYS = [(scores, score) for scores, score in itertools.product(("positional", "keyword"), ("before", "after"))]


def _make(way: tuple[str, str]) -> TinyMoE:
    """Experts with w1, w2, w3 that apply the scores themselves."""
    scores, score = way
    return TinyMoE(1, scores=scores, score=score)  # type: ignore[arg-type]


def _run(rank: int, way: tuple[str, str]) -> tuple[Tensor, dict[str, Any]]:
    module = ep_fx.transform(_make(way), local_mesh(fsdp=2, ep=2))
    y = module(token_ids(rank))
    next_token_loss(y, token_ids(rank)).backward()
    gradients = {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]
    return y.detach(), gradients


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way))
def test_api3_scores_by_position_or_keyword_before_or_after_equal_the_oracle(
    ranks: RankPools, way: tuple[str, str]
) -> None:
    ids = [(token_ids(rank),) for rank in range(4)]
    want = oracle(lambda: _make(way), ids, next_token_loss, ids)
    for rank, (y, gradients) in enumerate(ranks(4).run(_run, way)):
        assert relative_error(y, want.outputs[rank]) < 1e-5
        assert_all_gradients_close(gradients, want.gradients)
    assert want.gradients["blocks.0.moe.router.weight"].any()
    other = "after" if way[1] == "before" else "before"
    assert not torch.allclose(_make((way[0], other))(ids[0][0]), want.outputs[0])
