"""R15, checkpoints that keep one rank's experts, and moments of an optimizer that stay behind.

Sources: KempnerForge#202 (KempnerInstitute), DeepSpeed#8147, Tencent-Hunyuan/UniRL PR#158 (comment), modelscope/twinkle
PR#116.
Each rank names its experts from 0, or the shapes hide that they were split: one slice is saved, a resume on the same
layout puts it on every rank without a word, and Adam's moments belong to other experts. Here expert e is filled with
e + 1 and its moments with 10 (e + 1); after every load each must have its own constants. Names and shapes are those of
the whole model, so a slice is refused.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4, M4E
from tests.models.hand_moe import HandMoE

W = "experts.w"
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 3
FSDP4 = {"fsdp": 4, "ep": 1}


def _constants(factor: float) -> Tensor:
    """[4, 8, 8], expert e filled with ``factor * (e + 1)``."""
    return (factor * torch.arange(1, 5.0)).view(4, 1, 1).expand(4, 8, 8).clone()


def _started(module: nn.Module) -> torch.optim.AdamW:
    """An AdamW that has stepped with gradients of zeros, so that it has a state."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(STEPS):
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _whole(value: Any) -> Tensor:
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.clone()


def save(rank: int, folder: str) -> dict[str, list[int]]:
    """Writes module and optimizer on M4; returns the whole shapes that were written."""
    model = HandMoE()
    with torch.no_grad():
        model.experts.w.copy_(_constants(1))
    module = ep_fx.transform(model, local_mesh(**M4))
    optimizer = _started(module)
    like = ep_fx.transform(HandMoE(), local_mesh(**M4))
    like.load_state_dict(HandMoE().state_dict() | {W: _constants(10)})
    for moment in MOMENTS:
        optimizer.state[module.get_parameter(W)][moment].copy_(like.get_parameter(W).detach())
    weights, state = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    shapes = {name: list(value.shape) for name, value in weights.items()}
    return shapes | {moment: list(state["state"][W][moment].shape) for moment in MOMENTS}


def _loaded(module: nn.Module, folder: str) -> dict[str, Tensor]:
    """Weight, moments and step of the experts after a load into `module` and a fresh optimizer."""
    optimizer = _fresh(module)
    weights, state = get_state_dict(module, optimizer)
    whole = {"model": weights, "optimizer": state}
    dcp.load(whole, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    found = optimizer.state[module.get_parameter(W)]
    return {"w": _whole(module.get_parameter(W).detach())} | {name: _whole(found[name]) for name in (*MOMENTS, "step")}


def _fresh(module: nn.Module) -> torch.optim.AdamW:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return torch.optim.AdamW(module.parameters(), lr=1.0)


def load(rank: int, folder: str) -> list[dict[str, Tensor]]:
    """What is loaded on each of three meshes."""
    meshes = (M4, M4E, FSDP4)
    return [_loaded(ep_fx.transform(HandMoE(), local_mesh(**sizes)), folder) for sizes in meshes]


def _assert_own_constants(found: dict[str, Tensor]) -> None:
    assert torch.equal(found["w"], _constants(1))
    for moment in MOMENTS:
        assert torch.equal(found[moment], _constants(10)), moment
    assert float(found["step"]) == STEPS


def test_r15_every_expert_has_its_own_weights_and_moments_after_each_load(ranks: RankPools, tmp_path: Path) -> None:
    for shapes in ranks(4).run(save, str(tmp_path)):
        assert shapes == {W: [4, 8, 8], "router.weight": [4, 8], **{moment: [4, 8, 8] for moment in MOMENTS}}
    for on_each_mesh in ranks(4).run(load, str(tmp_path)):
        for found in on_each_mesh:
            _assert_own_constants(found)
    _assert_own_constants(_loaded(HandMoE(), str(tmp_path)))  # the model itself, in one process
    for part in tmp_path.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(CheckpointException, match="corrupted"):
        _loaded(HandMoE(), str(tmp_path))


def slices(rank: int) -> list[str]:
    """What is said to one rank's experts, and to a state without any."""
    module, said = ep_fx.transform(HandMoE(), local_mesh(**M4)), []
    state = HandMoE().state_dict()
    for experts in ({W: state[W][:2]}, {}):
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict({name: value for name, value in state.items() if name != W} | experts)
        said.append(str(error.value))
    return said


def test_r15_a_slice_of_the_experts_is_refused(ranks: RankPools) -> None:
    for shape, missing in ranks(4).run(slices):
        assert f"size mismatch for {W}" in shape
        assert "torch.Size([4, 8, 8])" in shape
        assert f'Missing key(s) in state_dict: "{W}"' in missing
