"""Comparison of an operator with the same computation in plain, differentiable PyTorch."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_same_values_and_gradients(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor], **tolerance: float
) -> None:
    """Both functions of `inputs` agree, and so do their gradients for one random gradient of the result."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    mine, theirs = ours(*leaves), reference(*leaves)
    torch.testing.assert_close(mine, theirs, **tolerance)
    grad = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, leaves, grad, materialize_grads=True)
    got = torch.autograd.grad(mine, leaves, grad, materialize_grads=True)
    for leaf, one, other in zip(leaves, got, expected, strict=True):
        assert one.shape == leaf.shape
        assert one.dtype == leaf.dtype
        torch.testing.assert_close(one, other, **tolerance)
