"""Experts of a list in and out of checkpoints, and classes around a list that the user registers."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.models.listed import InModel, Listed, MaskOfChoices, SkipIdle, tokens_of
from tests.oracle import relative_error

M4 = {"fsdp": 2, "ep": 2}


def _model() -> InModel:
    return InModel(MaskOfChoices, num_experts=4)


def _other(model: nn.Module) -> nn.Module:
    """The same class with other weights."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.5 + 0.1 * number, p.numel()).view(p.shape))
    return model


def _round_trip(rank: int) -> dict[str, Any]:
    mesh, other = local_mesh(**M4), _other(_model())
    module = ep_fx.transform(_model(), mesh)
    found: dict[str, Any] = {"names": [name for name, _ in module.named_parameters()]}
    want = _model().state_dict()
    found["as it was"] = _same(module.full_state_dict(), want)
    module.load_state_dict(other.state_dict())
    found["loaded"] = _same(module.full_state_dict(), other.state_dict())
    fresh = _model()
    fresh.load_state_dict(module.full_state_dict(), strict=True)
    found["forward"] = relative_error(module(tokens_of(rank)), fresh(tokens_of(rank)))
    empty = ep_fx.transform(_model().to("meta"), mesh)
    empty.to_empty(device="cpu")
    empty.load_state_dict(other.state_dict())
    found["from meta"] = _same(empty.full_state_dict(), other.state_dict())
    partial = {name: p for name, p in other.state_dict().items() if ".experts.2." not in name}
    try:
        module.load_state_dict(partial)
    except RuntimeError as error:
        found["partial"] = str(error)
    return found


def _distributed(rank: int) -> bool:
    mesh, other = local_mesh(**M4), _other(_model())
    module = ep_fx.transform(_other(_model()), mesh)
    path = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(path)
    dcp.save(module.state_dict(), checkpoint_id=path[0])
    again = ep_fx.transform(_model(), mesh)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=path[0])
    again.load_state_dict(state)
    return _same(again.full_state_dict(), other.state_dict())


def _same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_checkpoints_of_the_model_and_of_the_module_go_both_ways(ranks: RankPools) -> None:
    for found in ranks(4).run(_round_trip):
        assert found["names"] == [
            "inlet.weight", "inlet.bias", "outlet.weight", "outlet.bias", "blocks.0.router.weight",
            "blocks.0.experts.gate.weight", "blocks.0.experts.up.weight", "blocks.0.experts.down.weight",
            "blocks.0.experts.down.bias",
        ]  # fmt: skip
        for case in ("as it was", "loaded", "from meta"):
            assert found[case], case
        assert found["forward"] < 1e-6
        assert "blocks.0.experts.gate.weight" in found["partial"]


@pytest.mark.slow
def test_a_distributed_checkpoint_holds_the_stacks(ranks: RankPools) -> None:
    assert ranks(4).run(_distributed) == [True] * 4


class Outside(SkipIdle):
    """Its forward takes two arguments, so nothing is tried on it."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Around(Listed):
    """Gives the block inside what it needs."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        del self.experts
        self.inner, self.scale = Outside(**sizes), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.scale)


def _outside(module: Outside, x: Tensor, scale: Tensor) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    weights, ids = module.route(tokens)
    y = ep_fx.moe(tokens, ids, weights, module.experts, num_experts=len(module.experts))  # type: ignore[arg-type]
    return y.view(x.shape) * scale


def _registered(rank: int) -> tuple[str, str]:
    mesh, message = local_mesh(**M4), ""
    try:
        ep_fx.transform(InModel(Around), mesh)
    except ValueError as error:
        message = str(error)
    ep_fx.register_experts(Outside, _outside)
    return message, str(ep_fx.check(InModel(Around), mesh, tokens_of(rank), tolerance=1e-5))


def test_a_class_around_a_list_can_be_registered_in_five_lines(ranks: RankPools) -> None:
    for message, report in ranks(4).run(_registered):
        assert "blocks.0.inner.experts (" in message
        assert "ep_fx.register_experts(cls, fn)" in message
        assert "24 compared, 0 beyond" in report, report
