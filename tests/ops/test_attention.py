"""attention agrees with torch's, values and gradients, for every kind of mask that torch takes."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.gradients import assert_same_values_and_gradients

SEEN = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
"""Of three queries the second sees no key."""
MASKS = {
    "none": None,
    "rows": SEEN,
    "heads": torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(0)) > 0.3,
    "batch": torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(1)) > 0.3,
    "keys": torch.tensor([True, False, True, True, True]).view(1, 1, 1, 5),
    "added": torch.linspace(-3, 2, 15).view(3, 5),
    "added, minus infinity": torch.zeros(3, 5).masked_fill(~SEEN, -torch.inf),
}


def _operands(dtype: torch.dtype, heads: int = 4, shared: int = 4, width: int = 8, values: int = 8) -> list[Tensor]:
    made = torch.Generator().manual_seed(2)
    shapes = ((2, heads, 3, width), (2, shared, 5, width), (2, shared, 5, values))
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def _ours(mask: Tensor | None, is_causal: bool, scale: float) -> object:
    return lambda q, k, v: torch.ops.ep_fx.attention(q, k, v, mask, is_causal, scale)[0]


def _torch(mask: Tensor | None, is_causal: bool, scale: float, **options: bool) -> object:
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, **options
    )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_masks(mask: Tensor | None, dtype: torch.dtype) -> None:
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    assert_same_values_and_gradients(_ours(mask, False, 0.3), _torch(mask, False, 0.3), _operands(dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "shared", "values"), [(4, 4, 8), (4, 2, 8), (4, 1, 8), (4, 4, 6), (4, 2, 12)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_shared_keys_and_other_widths_of_values(heads: int, shared: int, values: int, is_causal: bool) -> None:
    operands = _operands(torch.float32, heads, shared, values=values)
    theirs = _torch(None, is_causal, 0.5, enable_gqa=heads != shared)
    assert_same_values_and_gradients(_ours(None, is_causal, 0.5), theirs, operands)  # type: ignore[arg-type]


def test_bf16_is_as_near_as_torch_is() -> None:
    operands = _operands(torch.bfloat16)
    exact = _torch(None, True, 0.5)(*(x.double() for x in operands))  # type: ignore[operator]
    ours, theirs = _ours(None, True, 0.5)(*operands), _torch(None, True, 0.5)(*operands)  # type: ignore[operator]
    assert (ours.double() - exact).norm() <= 1.1 * (theirs.double() - exact).norm()


def test_operands_that_are_not_contiguous() -> None:
    operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in _operands(torch.float32)]
    assert_same_values_and_gradients(_ours(None, True, 0.5), _torch(None, True, 0.5), operands)  # type: ignore[arg-type]


def test_no_rows_at_all() -> None:
    operands = [x[:0].requires_grad_() for x in _operands(torch.float32)]
    output, *statistics = torch.ops.ep_fx.attention(*operands, None, True, 0.5)
    output.sum().backward()
    assert output.shape == (0, 4, 3, 8)
    assert all(s.shape == (0, 4, 3, 8) and not s.requires_grad for s in statistics)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in operands)


def test_statistics_are_those_of_the_scores() -> None:
    query, key, value = _operands(torch.float32)
    _, highest, total = torch.ops.ep_fx.attention(query, key, value, None, False, 0.5)
    scores = query @ key.mT * 0.5
    torch.testing.assert_close(highest, scores.amax(-1, keepdim=True).expand(2, 4, 3, 8))
    torch.testing.assert_close((highest + total.log())[..., 3], scores.logsumexp(-1))
