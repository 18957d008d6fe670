"""A forward that casts a submodule at each call, as routers of transformers do: traced where idle, else refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from ep_fx.testing.fake import fake_mesh


class Casting(nn.Module):
    """Casts to fp32 what is fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.inner.to(torch.float32).float()
        return torch.tanh(self.outer(self.inner(x).to(self.outer.weight.dtype)))


def _run(rank: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    options = {"transform_options": {"plan": {}}}
    report = ep_fx.check(Casting(), local_mesh(fsdp=2, ep=2), torch.randn(3, 4), **options)  # type: ignore[arg-type]
    return str(report), nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64


def test_a_cast_that_changes_nothing_may_stand_in_forward(ranks: RankPools) -> None:
    for report, casts in ranks(4).run(_run):
        assert "5 compared, 0 beyond" in report, report
        assert casts


def _transform(model: Casting, dtype: torch.dtype = torch.float32) -> nn.Module:
    x = torch.randn(3, 4, dtype=dtype)
    with fake_mesh(fsdp=2, ep=2) as mesh:
        return ep_fx.transform(model, mesh, plan={}, example_inputs=(x,))


def test_a_cast_that_changes_weights_is_refused_by_module_line_and_remedy() -> None:
    with pytest.raises(ValueError, match="forward converts this module for good") as caught:
        _transform(Casting().to(torch.bfloat16), torch.bfloat16)
    message = str(caught.value)
    assert message.startswith("inner (")
    assert "test_conversions.py:" in message
    assert "its weight is torch.bfloat16 and becomes torch.float32" in message
    assert "model.get_submodule('inner').to(torch.float32)" in message


def test_converted_before_as_the_message_says_the_model_is_captured_with_two_dtypes_in_a_unit() -> None:
    model = Casting().to(torch.bfloat16)
    model.inner.to(torch.float32)
    module = _transform(model)
    assert {p.dtype for p in module.parameters()} == {torch.float32, torch.bfloat16}


def test_methods_of_a_module_are_torchs_own_again_afterwards() -> None:
    _transform(Casting())
    assert nn.Linear(2, 2).double().weight.dtype is torch.float64
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype is torch.bfloat16
