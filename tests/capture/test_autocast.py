"""Under autocast a cast of a weight has memory of its own: the weight is freed right after it is made."""

from __future__ import annotations

import torch

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.models.tiny_moe import TinyMoE
from tests.oracle import relative_error


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.float().pow(2).mean()


def _run(rank: int, options: dict[str, object]) -> dict[str, float]:
    ids = torch.arange(8).remainder(7).view(2, 4)
    eager = TinyMoE()
    module = ep_fx.transform(TinyMoE(), local_mesh(fsdp=2, ep=2), **options)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        want, got = eager(ids), module(ids)
    assert got.dtype == want.dtype
    _loss(want).backward()
    _loss(got).backward()
    full = {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]
    errors = {name: relative_error(full[name], p.grad) for name, p in eager.named_parameters()}  # type: ignore[arg-type]
    return {"output": relative_error(got.float(), want.float()), **errors}


def test_autocast_equals_eager_autocast_to_bf16_rounding(ranks: RankPools) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        for errors in ranks(4).run(_run, options):
            assert max(errors.values()) < 3e-2, errors
