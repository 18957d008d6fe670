"""How far a transformed model of the table is from the same model whole: every output field, every gradient.

The reference needs no transform: each rank runs the whole model on its own batch, and the gradients of the ranks are
averaged, which is the gradient of the mean over ranks of each rank's loss.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx.testing.ranks import local_mesh
from tests.models.architectures import Architecture, build, inputs_of
from tests.models.families import row
from tests.oracle import relative_error

FLOOR = 1e-3
"""A gradient of smaller norm is what remains of terms a hundred times larger that cancel, such as that of a key's bias
under softmax or of the weights of parallel residual streams before a norm (others have norms of 0.1 to 10), and eager
fp32 itself rounds it that much (5e-5 against fp64 at a norm of 1e-4): its error is relative to this norm. So a
difference of norm 1e-8 passes, a tenth of the rounding of 1.0."""


@dataclass
class Findings:
    """What one rank found.

    Args:
        outputs: relative error of each tensor of the output.
        gradients: relative error of each parameter's gradient.
        regions: number of experts modules in the graph.
    """

    outputs: dict[str, float]
    gradients: dict[str, float]
    regions: int


def measure(rank: int, name: str, sizes: dict[str, int]) -> Findings:
    """One forward and backward of the architecture `name` on the mesh `sizes`."""
    architecture = row(name)
    module = ep_fx.transform(build(architecture), local_mesh(**sizes), dynamic=architecture.dynamic)
    return compare(rank, architecture, module, build(architecture))


def compare(rank: int, architecture: Architecture, module: nn.Module, whole: nn.Module) -> Findings:
    """Both models on the rank's batch."""
    kwargs = inputs_of(architecture, rank)
    got, want = module(**kwargs), whole(**kwargs)
    fields, expected = dict(tensors_of(got)), dict(tensors_of(want))
    assert fields.keys() == expected.keys(), (sorted(fields), sorted(expected))
    loss_of(got).backward()
    loss_of(want).backward()
    gradients = {}
    for (name, parameter), reference in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert parameter.requires_grad == reference.requires_grad, name
        if reference.requires_grad:
            gradients[name] = _error(_full(parameter.grad), _averaged(reference))
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in whole.named_parameters()]
    regions = len(module.graph.manifest.regions)  # type: ignore[union-attr]
    return Findings({n: relative_error(fields[n], x) for n, x in expected.items()}, gradients, regions)


def tensors_of(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every floating tensor of an output by its field; a generation cache is no tensor."""
    for name, value in output.items():
        for index, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, Tensor) and part.is_floating_point():
                yield (f"{name}{index}" if isinstance(value, tuple) else name), part


def loss_of(output: Any) -> Tensor:
    """The model's own loss; without one, a mean in which every element counts differently."""
    if output.get("loss") is not None:
        return output["loss"]
    first = next(part for _, part in tensors_of(output))
    weights = torch.randn(first.shape[-1], generator=torch.Generator().manual_seed(7))
    return (first @ weights).tanh().mean()


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm()) / max(float(want.double().norm()), FLOOR)


def _averaged(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def _full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
