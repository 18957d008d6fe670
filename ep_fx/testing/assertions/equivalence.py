"""`assert_equivalent`: a transformed module computes what the eager model does: every token, all gradients."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ep_fx.check import CheckReport, compare
from ep_fx.runtime import EPModule

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_SMALLEST = 1e-3
"""Share of the average token's norm below which a token's error is measured against the average instead."""


def assert_equivalent(
    model: nn.Module, module: EPModule, inputs: Any, *, tolerance: float | None = None
) -> CheckReport:
    """Outputs, and the raw gradient of every parameter, of `module` are those of `model` on this rank's mesh.

    To be called on every rank of the module's mesh; inputs may differ by rank. Gradients of the model are averaged over
    the data ranks first. The model runs as a copy and stays as it is.

    Args:
        model: the eager model; `module` was transformed from a copy of it, since `transform` consumes what it gets.
        inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        tolerance: largest relative error of a gradient (Frobenius) and of any token of an output (its last dimension);
            None: 1e-9 for fp64, 1e-5 for fp32, 5e-2 below.

    Returns:
        The errors.

    Raises:
        AssertionError: the outputs and parameters that differ, worst first, the same on every rank.
        TypeError: `module` is no transformed module.
        ValueError: there is nothing to run: the model's weights are gone, or the ranks are fake.
    """
    __tracebackhide__ = True
    if not isinstance(module, EPModule):
        raise TypeError(
            f"module: expected what ep_fx.transform returned (an EPModule), got {type(module).__name__}; the arguments "
            "are assert_equivalent(model, ep_fx.transform(copy.deepcopy(model), mesh), inputs)"
        )
    gone = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if gone:
        raise ValueError(
            f"the model has no weights (parameter {gone[0]!r} is on the meta device): transform consumes the model it "
            "gets; give it copy.deepcopy(model) and keep the model"
        )
    if dist.get_backend() == "fake":
        raise ValueError("ranks of ep_fake_mesh never communicate, so nothing that runs there is right; use ep_ranks")
    args, kwargs = _arguments(inputs)
    dtypes = [parameter.dtype for parameter in model.parameters()]
    limit = tolerance if tolerance is not None else max((_TOLERANCE.get(d, 5e-2) for d in dtypes), default=1e-5)
    report = compare(model, module, *args, tolerance=limit, error=worst_token, **kwargs)
    if not report.ok:
        raise AssertionError(f"the transformed module differs from the eager model\n{report}")
    return report


def worst_token(got: torch.Tensor | None, want: torch.Tensor) -> float:
    """The largest relative error of one token: over the last dimension of an output, of shape [..., features].

    A token that is almost zero beside the others is measured by the average norm of all.
    """
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    got, want = (x.to(wide).reshape(-1, x.shape[-1] if x.ndim else 1) for x in (got, want))
    if torch.equal(got, want):
        return 0.0
    norms = want.norm(dim=-1)
    scale = norms.clamp(min=_SMALLEST * float(norms.square().mean().sqrt()))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return float(((got - want).norm(dim=-1) / scale).max().nan_to_num(nan=float("inf")))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})
