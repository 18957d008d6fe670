"""What a forward leaves on its modules: refused, but for what transformers keeps for generation."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ep_fx.capture.untouched import untouched


class Positions(nn.Module):
    """Stores a tensor as models with 3-D positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.rope_deltas: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.rope_deltas = x.sum(1)
        return x


class OfTransformers(Positions):
    """The same in a module of transformers."""

    __module__ = "transformers.models.mine"


def run(model: nn.Module) -> None:
    with untouched(model), FakeTensorMode():
        model(torch.ones(2, 3))


def test_what_a_model_of_transformers_keeps_for_generation_is_put_back() -> None:
    model = OfTransformers()
    run(model)
    assert model.rope_deltas is None


def test_the_same_name_in_a_model_of_ones_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Positions\.rope_deltas: forward stores a tensor"):
        run(Positions())
