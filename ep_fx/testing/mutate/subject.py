"""What mutants are made of: a valid graph of a real model, with the weights and batches to run it on real ranks.

Captured in one process without communication, on a fake process group of the right size.

Private torch API used here: ``torch.testing._internal.distributed.fake_pg``.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ep_fx.api import transform
from ep_fx.capture import Inputs
from ep_fx.graph import ParallelGraph

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A valid graph and what it takes to run it.

    Args:
        name: for the table.
        graph: the graph after all passes.
        sizes: of the mesh dimensions.
        parameters: full value of each parameter, in graph order.
        buffers: value of each buffer, in graph order.
        batches: for each micro-batch and rank the input tensors, in graph order.
    """

    name: str
    graph: ParallelGraph
    sizes: Mapping[str, int]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    batches: tuple[tuple[tuple[Tensor, ...], ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.batches[0])


def capture(
    name: str, model: nn.Module, sizes: Mapping[str, int], batches: Sequence[Sequence[Batch]], **options: Any
) -> Subject:
    """The subject of `model`, to be called inside `fake_world` of the mesh's size.

    Args:
        name: for the table.
        model: is consumed.
        sizes: of the mesh dimensions.
        batches: for each micro-batch and rank positional and keyword arguments of the model.
        options: of `ep_fx.transform`.
    """
    parameters = tuple(p.detach().clone() for p in model.parameters())
    buffers = tuple(b.detach().clone() for b in model.buffers())
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    args, kwargs = batches[0][0]
    module = transform(model, mesh, example_inputs=args, example_kwargs=kwargs, **options)
    tensors = tuple(tuple(tuple(Inputs.of(*batch).tensors) for batch in ranks) for ranks in batches)
    return Subject(name, module.graph, dict(sizes), parameters, buffers, tensors)
