"""The oracle's comparisons find what is wrong and name all of it."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import assert_all_gradients_close, oracle, relative_error


class Half(nn.Module):
    """``x * used``; one parameter is never used, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(2))
        self.idle = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.used * self.frozen


@pytest.mark.parametrize(("reduce", "factor"), [("mean", 0.5), ("sum", 1.0)])
def test_gradient_of_the_mean_or_sum_over_ranks(reduce: str, factor: float) -> None:
    batches = [(torch.tensor([1.0, 2.0]),), (torch.tensor([3.0, 5.0]),)]
    result = oracle(Half, batches, lambda y, scale: scale * y.sum(), [(1.0,), (10.0,)], reduce)  # type: ignore[arg-type]
    assert [loss.item() for loss in result.losses] == [3.0, 80.0]
    assert torch.equal(result.gradients["used"], factor * torch.tensor([31.0, 52.0]))
    assert torch.equal(result.gradients["idle"], torch.zeros(2))
    assert "frozen" not in result.gradients


def test_relative_error_of_a_zero_is_absolute() -> None:
    assert relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0


def test_every_offender_is_named() -> None:
    want = {name: torch.ones(2) for name in ("good", "absent", "shape", "nan", "scale")}
    got = {
        "good": torch.ones(2) + 1e-7,
        "absent": None,
        "shape": torch.ones(3),
        "nan": torch.full((2,), torch.nan),
        "scale": torch.full((2,), 2.0),
        "stranger": torch.ones(2),
    }
    with pytest.raises(AssertionError, match="5 of 5 gradients are wrong") as caught:
        assert_all_gradients_close(got, want)
    text = str(caught.value)
    for line in ("stranger: not expected", "absent: missing", "shape: shape (3,)", "nan: not finite", "scale: rel"):
        assert line in text
    assert "good" not in text
