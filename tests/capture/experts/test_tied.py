"""Experts modules that share their weights: each is found, and both name the parameters as the model does."""
from __future__ import annotations

from torch import nn

from ep_fx.capture.experts import find_experts
from tests.models.hand_moe import HandExperts


def test_tied_parameters_go_by_their_first_name() -> None:
    model = nn.ModuleDict({"encoder": HandExperts(), "decoder": HandExperts(), "other": HandExperts()})
    model["decoder"].w = model["encoder"].w
    found = {e.path: e.parameters for e in find_experts(model, None, {"ep": 2})}
    assert found == {"encoder": ("encoder.w",), "decoder": ("encoder.w",), "other": ("other.w",)}
