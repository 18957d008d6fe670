"""The oracle: the whole model in one process, run on every rank's batch, and comparisons with what it says.

Convention: gradients are those of the mean over ranks of each rank's loss ("sum": of their sum).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Oracle:
    """What the single process computed.

    Args:
        outputs: the model's output on each rank's batch, detached where it is a tensor.
        losses: loss of each rank's batch.
        gradients: gradient of every trainable parameter, zeros where none flowed.
    """

    outputs: list[Any]
    losses: list[Tensor]
    gradients: dict[str, Tensor]


def oracle(
    make_model: Callable[[], nn.Module],
    batches: Sequence[tuple[Any, ...]],
    loss_fn: Callable[..., Tensor],
    targets: Sequence[tuple[Any, ...]] | None = None,
    reduce: Literal["mean", "sum"] = "mean",
) -> Oracle:
    """Runs a fresh model on the batches of all ranks, one after the other.

    Args:
        make_model: makes the model, with the weights that the ranks start from.
        batches: positional arguments of the model, for each rank.
        loss_fn: ``loss_fn(output, *targets of the rank)``.
        targets: further arguments of `loss_fn`, for each rank.
        reduce: how the losses of the ranks are joined.
    """
    model = make_model()
    outputs, losses = [], []
    for batch, rest in zip(batches, targets or [()] * len(batches), strict=True):
        output = model(*batch)
        loss = loss_fn(output, *rest)
        (loss / len(batches) if reduce == "mean" else loss).backward()
        outputs.append(output.detach() if isinstance(output, Tensor) else output)
        losses.append(loss.detach())
    return Oracle(outputs, losses, gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradient of every trainable parameter by name, zeros where it has none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`; of `got` itself where `want` is zero."""
    got, want = got.detach().double(), want.detach().double()
    scale = float(want.norm())
    return float((got - want).norm()) / (scale or 1.0)


def assert_all_gradients_close(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor], tol: float = 1e-5, atol: float = 1e-9
) -> None:
    """Every gradient that is due is there, finite, of the right shape, and equal; names all that are not.

    Args:
        got: full gradients by parameter name.
        want: what the oracle says.
        tol: largest relative error.
        atol: a difference of at most this norm is rounding, in a gradient that is zero but for rounding.
    """
    offenders = [f"{name}: not expected" for name in got if name not in want]
    offenders += [f"{name}: {fault}" for name, w in want.items() if (fault := _fault(got.get(name), w, tol, atol))]
    assert not offenders, f"{len(offenders)} of {len(want)} gradients are wrong:\n  " + "\n  ".join(offenders)


def _fault(got: Tensor | None, want: Tensor, tol: float, atol: float) -> str | None:
    if got is None:
        return "missing"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not got.isfinite().all():
        return "not finite"
    error = relative_error(got, want)
    if error <= tol or (got.double() - want.double()).norm() <= atol:
        return None
    norms = f"norms {got.double().norm():.6g}, expected {want.double().norm():.6g}"
    return f"relative error {error:.3g} > {tol:g} ({norms})"
