"""Every architecture in bf16: captured, transformed and verified after every pass, in one process."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing.fake import fake_mesh
from tests.models.architectures import build, inputs_of
from tests.models.families import ROWS, UNDECORATED, row

CONVERTING = ("nllb_moe", "switch_transformers")
"""Their routers convert their classifier to fp32 in forward, for good."""
OVERRIDES: dict[str, dict[str, Any]] = {"longcat_flash": {"zero_expert_num": 0}}
NO_FORM = ("jetmoe",)
"""Refused in every dtype, for the form of its experts."""
NAMES = [r.name for r in (*ROWS, *UNDECORATED) if r.name not in NO_FORM]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def half(name: str) -> nn.Module:
    """The model of the row `name` in bf16."""
    return build(row(name), **OVERRIDES.get(name, {})).to(torch.bfloat16)


def transformed(name: str, model: nn.Module) -> Any:
    """`model` on fsdp 2 x ep 2, captured with the row's inputs at their own sizes."""
    inputs = {n: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x
              for n, x in inputs_of(row(name), 0).items()}
    with fake_mesh(fsdp=2, ep=2) as mesh:
        return ep_fx.transform(model, mesh, example_kwargs=inputs, dynamic=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_bf16_is_transformed_and_no_rule_is_broken(name: str) -> None:
    model = half(name)
    if name in CONVERTING:
        for path, module in model.named_modules():
            if path.endswith("router.classifier"):
                module.to(torch.float32)
    module = transformed(name, model)
    assert module.verify().ok
    assert len(module.graph.manifest.regions) >= 1
    assert module.graph.gradients


@pytest.mark.parametrize("name", CONVERTING)
def test_routers_that_convert_their_weights_in_forward_are_refused_with_the_remedy(name: str) -> None:
    where = rf"router\.classifier \(.*modeling_{name}\.py:\d+\): forward converts"
    with pytest.raises(ValueError, match=where) as caught:
        transformed(name, half(name))
    assert "before transform" in str(caught.value)
