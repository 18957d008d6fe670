"""`check`: one call that compares a transformed copy of a model with the eager model, on the user's mesh and inputs.

The eager model runs whole on every rank; its gradients are averaged over the data ranks, as the transformed module's
are. Both get the same random cotangents, so every output and every parameter is compared, before any optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ep_fx.api import transform
from ep_fx.capture import drop_caches
from ep_fx.config import mesh_sizes
from ep_fx.graph import DATA_DIMS
from ep_fx.runtime import EPModule

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class CheckError(AssertionError):
    """A transformed module does not compute what the eager one does."""


@dataclass(frozen=True)
class CheckReport:
    """Relative Frobenius errors, the largest over all ranks.

    Args:
        outputs: error of each tensor of the output, by its place.
        gradients: error of each trainable parameter's gradient, by name.
        tolerance: largest error that counts as rounding.
    """

    outputs: dict[str, float]
    gradients: dict[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every error is rounding."""
        return all(error <= self.tolerance for error in (*self.outputs.values(), *self.gradients.values()))

    def raise_if_wrong(self) -> CheckReport:
        """Itself where all is well.

        Raises:
            CheckError: names every output and parameter that differs.
        """
        if not self.ok:
            raise CheckError(str(self))
        return self

    def __str__(self) -> str:
        rows = [
            *(("output", *item) for item in self.outputs.items()),
            *(("gradient", *i) for i in self.gradients.items()),
        ]
        bad = sum(not error <= self.tolerance for _, _, error in rows)
        head = f"{len(rows)} compared, {bad} beyond {self.tolerance:g}"
        rows.sort(key=lambda row: row[2] <= self.tolerance)
        return "\n".join([head, *(f"  {error:9.2e}  {kind:8}  {name}" for kind, name, error in rows)])


def check(
    model: nn.Module,
    mesh: DeviceMesh,
    *inputs: Any,
    tolerance: float | None = None,
    transform_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Compares the eager model with its transformed copy: outputs, and the gradient of every parameter.

    All ranks of `mesh` must call it, with the same weights; inputs may differ by rank. The model itself is not changed.

    Args:
        inputs, kwargs: the model's arguments.
        tolerance: largest relative error; None: 1e-9 for fp64, 1e-4 for fp32, 5e-2 below.
        transform_options: options for `transform`.

    Returns:
        The errors; see `CheckReport.ok` and `CheckReport.raise_if_wrong`.

    Raises:
        TypeError, ValueError: as `transform`.
    """
    module = transform(copy.deepcopy(model), mesh, **(transform_options or {}))
    return compare(model, module, *inputs, tolerance=tolerance, **kwargs)


def compare(
    model: nn.Module,
    module: EPModule,
    *inputs: Any,
    tolerance: float | None = None,
    error: Callable[[torch.Tensor | None, torch.Tensor], float] | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Compares the eager model with a transformed module that has the same weights; see `check`.

    The model runs as a copy; the module itself runs, and has its gradients from before again afterwards.

    Args:
        error: of an output tensor against the eager one; None: relative, over the whole tensor.
    """
    module.prepare(*inputs, **kwargs)
    mesh = next(p.device_mesh for p in module.parameters() if isinstance(p, DTensor))
    want_outputs, want_gradients = _run(copy.deepcopy(model), inputs, kwargs)
    before = {name: parameter.grad for name, parameter in module.named_parameters()}
    try:
        got_outputs, got_gradients = _run(module, inputs, kwargs)
    finally:
        for name, parameter in module.named_parameters():
            parameter.grad = before[name]
    error = error or _error
    outputs = {name: error(got_outputs.get(name), want) for name, want in want_outputs.items()}
    outputs.update({name: float("inf") for name in got_outputs if name not in want_outputs})
    gradients = {name: _error(got_gradients.get(name), _mean(want, mesh)) for name, want in want_gradients.items()}
    dtypes = [p.dtype for p in model.parameters()]
    limit = tolerance if tolerance is not None else max((_TOLERANCE.get(d, 5e-2) for d in dtypes), default=1e-4)
    outputs_max, gradients_max = _largest(outputs, mesh), _largest(gradients, mesh)
    return CheckReport(outputs_max, gradients_max, limit)


def _run(module: nn.Module, inputs: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Output tensors by place, and full gradients by parameter name, of one run with random cotangents."""
    module.zero_grad(set_to_none=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output, _ = drop_caches(module(*inputs, **kwargs))
        leaves = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(output)[0]]
        tensors = {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
        roots = [leaf for leaf in tensors.values() if leaf.requires_grad]
        torch.manual_seed(1)
        if roots:
            torch.autograd.backward(roots, [torch.randn_like(root) for root in roots])
    gradients: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    if isinstance(module, EPModule):
        gradients = module.by_original_names(gradients)
    return {name: tensor.detach() for name, tensor in tensors.items()}, gradients


def _mean(gradient: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The mean of `gradient` over the data ranks of `mesh`."""
    total = gradient.detach().clone()
    sizes = mesh_sizes(mesh)
    count = 1
    for dim in DATA_DIMS:
        if sizes.get(dim, 1) > 1:
            dist.all_reduce(total, group=mesh.get_group(dim))
            count *= sizes[dim]
    return total / count


def _error(got: torch.Tensor | None, want: torch.Tensor) -> float:
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    got, want = got.double(), want.double()
    difference = float((got - want).norm())
    return difference if difference == 0.0 else difference / (float(want.norm()) or 1.0)


def _largest(errors: dict[str, float], mesh: DeviceMesh) -> dict[str, float]:
    """Each error, the largest over all ranks of `mesh`; not-a-number counts as infinite."""
    values = torch.tensor(list(errors.values()), device=mesh.device_type).nan_to_num(nan=float("inf"))
    for index in range(mesh.ndim):
        if mesh.size(index) > 1 and values.numel():
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mesh.get_group(index))
    return dict(zip(errors, values.tolist(), strict=True))
