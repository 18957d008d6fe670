"""The parallel styles of experts: applied to a module by hand, or named in the `plan` of `transform`.

    experts = ExpertParallel().apply(moe.experts, mesh)           eager, with or without torch's `fully_shard`
    transform(model, mesh, plan={"*.experts": ExpertParallel()})  in the graph

A style is a frozen value: it holds nothing but what it says, and two of the same class are equal.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.styles.apply import apply_style


@dataclass(frozen=True)
class Style:
    """What all styles of experts have in common.

    Attributes:
        mesh_dims: names of the mesh dimensions over which the style splits experts.
    """

    mesh_dims: ClassVar[tuple[str, ...]] = ()

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Splits the experts of `module` and sends its tokens to them; collective over `device_mesh`.

        Its parameters become DTensors on ``device_mesh[mesh_dims]``, under their own names. Its class, its forward
        signature and its callers stay as they are. `fully_shard` may be applied before or after, to the experts over
        mesh dimensions that the style does not split over (``mesh["fsdp"]``).

        Gradients: those of the mean over ``ep`` of each rank's loss; what FSDP averages over comes on top of it, so
        that with experts sharded over ``fsdp`` they are those of the mean over ``fsdp x ep``. An expert's gradient
        holds the sum over ``ep`` already and is divided by its size. The module's other parameters (router, shared
        expert, if a whole MoE is given) are averaged over ``ep`` unless `fully_shard` does so. Parameters outside of
        `module` are the caller's: shard them over ``fsdp x ep``, or give the whole MoE.

        Args:
            module: experts ``experts(x[N, D] in expert order, num_tokens_per_expert[E], scores[N]=None)`` with
                parameters ``[E, ...]``, or those of transformers (EP only), or a module that contains exactly one such
                module. The same weights on every rank, on the mesh's device or meta.
            device_mesh: has the dimensions `mesh_dims`, and any others.

        Returns:
            `module`.

        Raises:
            TypeError: not a Module, or not a DeviceMesh.
            ValueError: a mesh without these dimensions, experts that are not found, cannot be divided, are split
                already, or are sharded over the same ranks. At the first forward: FSDP units whose gradients would be
                divided twice, or not reduced over ``ep`` by anybody.
        """
        return apply_style(self, self.mesh_dims, module, device_mesh)


@dataclass(frozen=True)
class ExpertParallel(Style):
    """Whole experts per rank: the parameters ``[E, ...]`` are split over the mesh dimension ``ep`` along dim 0, and
    tokens travel to their experts over ``ep``."""

    mesh_dims: ClassVar[tuple[str, ...]] = ("ep",)


@dataclass(frozen=True)
class TensorParallel(Style):
    """A part of every expert per rank: ``w1, w3 [E, hidden, dim]`` are split over the mesh dimension ``tp`` along dim 1
    and ``w2 [E, dim, hidden]`` along dim 2; the ranks along ``tp`` hold the same tokens, and their partial outputs are
    added up."""

    mesh_dims: ClassVar[tuple[str, ...]] = ("tp",)


@dataclass(frozen=True)
class ExpertTensorParallel(Style):
    """Both: dim 0 over ``ep``, and each expert's hidden features over ``tp``. Tokens travel over ``ep`` only, between
    ranks with the same place along ``tp``."""

    mesh_dims: ClassVar[tuple[str, ...]] = ("ep", "tp")
