"""What a user does with a model on an npu mesh beside training it, in the order of a script."""
from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import ep_fx
from ep_fx.testing.ranks import RankPool, local_mesh
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import relative_error


def _script(rank: int) -> None:
    """The model is on the device before: checked, transformed, clipped, saved, evaluated."""
    mesh, ids = local_mesh(fsdp=2, ep=2), token_ids(rank).to("npu")
    model = TinyMoE().to("npu")
    ep_fx.check(model, mesh, ids).raise_if_wrong()
    whole = copy.deepcopy(model)
    module = ep_fx.transform(model, mesh)
    next_token_loss(module(ids), ids).backward()
    norm: Any = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert norm.full_tensor().isfinite()
    with torch.no_grad():
        assert relative_error(module.eval()(ids).cpu(), whole.eval()(ids).cpu()) <= 1e-5
    file = io.BytesIO()
    torch.save(module.full_state_dict(), file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    assert all(torch.equal(saved[name], value.cpu()) for name, value in whole.state_dict().items())


def _autocast(rank: int) -> None:
    """The capture is on the CPU, the caller's autocast is the device's: it must not be lost on the way."""
    ids = token_ids(rank)
    eager, module = TinyMoE(), ep_fx.transform(TinyMoE(), local_mesh(fsdp=2, ep=2))
    with torch.autocast("cpu", torch.bfloat16):
        want = eager(ids)
    with torch.autocast("npu", torch.bfloat16):
        got = module(ids.to("npu"))
    assert got.dtype == want.dtype
    assert relative_error(got.cpu().float(), want.float()) < 3e-2


@pytest.mark.slow
def test_a_script_with_the_model_on_the_device(npu_ranks: RankPool) -> None:
    npu_ranks.run(_script)


def test_autocast_of_the_device_is_that_of_the_capture(npu_ranks: RankPool) -> None:
    npu_ranks.run(_autocast)
