"""The facts that no pass may change: parameters, layouts, regions, mesh, outputs.

Written once by capture and sharding, frozen, read by passes and by the verifier. Without it nothing could notice
what a pass removed: a region, a buffer update, a gradient turned into zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

DATA_DIMS = ("replicate", "fsdp", "ep")
MESH_DIMS = (*DATA_DIMS, "tp")


@dataclass(frozen=True)
class MeshSpec:
    """The mesh as the graph sees it: sizes and group names, no process group objects.

    Args:
        sizes: size of each of the dimensions ``replicate, fsdp, ep, tp``; a missing dimension has size 1.
        groups: process-group name of each tuple of dimensions that has more than one rank,
            e.g. ``{("fsdp", "ep"): "7", ("ep",): "3"}``.
        exchange: name of the group of the token exchange over ``ep``, where it is another one than that of the gathers
            over ``ep``: an exchange never shares a group with FSDP, even of the same ranks. Empty: ``("ep",)``.
    """

    sizes: Mapping[str, int]
    groups: Mapping[tuple[str, ...], str]
    exchange: str = ""

    def size(self, *dims: str) -> int:
        """Number of ranks along `dims` together."""
        return math.prod(self.sizes.get(dim, 1) for dim in dims)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that hold tokens of their own."""
        return self.size(*DATA_DIMS)

    def group(self, *dims: str) -> str:
        """Name of the process group along `dims` (dimensions of size 1 do not count).

        Raises:
            KeyError: no such group, e.g. because its size is 1.
        """
        return self.groups[self.live(dims)]

    @property
    def exchange_group(self) -> str:
        """Name of the process group of dispatch and combine."""
        return self.exchange or self.group("ep")

    def live(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        """`dims` without those of size 1, in mesh order."""
        return tuple(dim for dim in MESH_DIMS if dim in dims and self.size(dim) > 1)

    def dims_of(self, group: str) -> tuple[str, ...] | None:
        """The dimensions whose group is called `group`, None for a group that is not of this mesh."""
        if self.exchange and group == self.exchange:
            return ("ep",)
        return next((dims for dims, name in self.groups.items() if name == group), None)


@dataclass(frozen=True)
class Layout:
    """How one parameter lies on the mesh.

    Args:
        shape: global shape, as the user sees it.
        full_shape: shape of the unsharded parameter on one rank: `shape`, with dim 0 divided by `ep` for experts and
            `tp_dim` divided by `tp`.
        is_expert: dim 0 is split over ``ep``.
        gather_dims: mesh dimensions over which the shards are gathered: ``("fsdp", "ep")`` for dense parameters,
            ``("fsdp",)`` for experts; without dimensions of size 1; empty: the parameter is not sharded.
        shard_dim: dimension of `full_shape` that is cut; 0 where nothing is cut.
        shard_sizes: length of the cut along `shard_dim` for each rank of the gather group, in group order;
            ``(full,)`` where nothing is cut. Uneven and zero lengths are allowed.
        tp_dim: dimension cut over ``tp``, another than `shard_dim`; None: all ranks along ``tp`` hold the same.
        tp_blocks: number of equal blocks along `tp_dim` of which each is cut, so that a rank's part is one piece of
            each: 2 for a gate's weights followed by the up-projection's.
    """

    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    is_expert: bool
    gather_dims: tuple[str, ...]
    shard_dim: int
    shard_sizes: tuple[int, ...]
    tp_dim: int | None = None
    tp_blocks: int = 1

    @property
    def padded_size(self) -> int:
        """Length along `shard_dim` that every rank contributes to a gather."""
        return max(self.shard_sizes)

    @property
    def is_even(self) -> bool:
        """Whether the gathered buffer is the parameter, with no copy: equal cuts along dim 0."""
        return self.shard_dim == 0 and len(set(self.shard_sizes)) == 1


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the model.

    Args:
        name: name in ``named_parameters()``.
        placeholder: name of its placeholder node; the value is the rank's shard once `fsdp` ran, else the full one.
        dtype: dtype of the parameter.
        trainable: whether a gradient is due.
        layout: where it lies on the mesh.
        unit: FSDP unit that gathers it.
    """

    name: str
    placeholder: str
    dtype: torch.dtype
    trainable: bool
    layout: Layout
    unit: str

    @property
    def full_bytes(self) -> int:
        """Bytes of the unsharded parameter on one rank."""
        return math.prod(self.layout.full_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BufferSpec:
    """One buffer: its name, its placeholder node, and whether the model's forward updates it in place."""

    name: str
    placeholder: str
    mutated: bool


@dataclass(frozen=True)
class RegionSpec:
    """One MoE region, the code between a dispatch and its combine.

    Args:
        name: module path of the experts.
        num_experts: number of experts over all ranks.
        parameters: names of the expert parameters.
        unit: FSDP unit of these parameters.
        has_backward: whether a gradient flows through the region.
        ep_size: number of ranks its experts are split over; None: all of the mesh's ``ep``. 1 on a larger mesh: the
            plan left these experts whole, and every rank computes its own tokens.
    """

    name: str
    num_experts: int
    parameters: tuple[str, ...]
    unit: str
    has_backward: bool = True
    ep_size: int | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything about the model and its placement that passes and rules may rely on.

    Args:
        mesh: sizes and groups.
        parameters: in the order of their placeholders, which come first in the graph.
        buffers: in the order of their placeholders, which come next.
        inputs: names of the placeholders of the user's tensors, next.
        tangents: names of the placeholders of the gradients of the differentiable outputs, last.
        num_outputs: length of the first tuple of the graph's output.
        differentiable: indices into the outputs, one for each tangent.
        input_grads: names of the inputs whose gradient is due, in the order of the graph's third output tuple.
        regions: MoE regions in order of execution; a region that runs n times stands here n times.
        zero_gradients: names of trainable parameters whose gradient is zero by construction: no output depends on them,
            or only through what carries no gradient.
        grad_reduce: "mean": gradient of the mean over data ranks of each rank's loss; "sum": of their sum.
        reshard_after_forward: whether gathered parameters are freed in forward and gathered again in backward.
        expert_reshard: "strict": experts stay gathered from before dispatch to after combine; "early": to last use.
        prefetch_depth: how many units may be gathered ahead of their first use.
        computation: a number for each output, gradient and updated buffer that stands for how it is computed (rule
            `computes`); empty: not recorded.

    The graph's output is ``((outputs...), (gradient of each trainable parameter, in order...), (input gradients...))``.
    """

    mesh: MeshSpec
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[str, ...]
    tangents: tuple[str, ...]
    num_outputs: int
    differentiable: tuple[int, ...]
    input_grads: tuple[str, ...] = ()
    regions: tuple[RegionSpec, ...] = ()
    zero_gradients: tuple[str, ...] = ()
    grad_reduce: Literal["mean", "sum"] = "mean"
    reshard_after_forward: bool = True
    expert_reshard: Literal["strict", "early"] = "strict"
    prefetch_depth: int = 0
    computation: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    names: Mapping[str, ParameterSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {p.name: p for p in self.parameters})

    @property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        """Parameters with a gradient, in the order of the graph's second output tuple."""
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def units(self) -> dict[str, tuple[ParameterSpec, ...]]:
        """Parameters of each FSDP unit, both in parameter order."""
        units: dict[str, list[ParameterSpec]] = {}
        for parameter in self.parameters:
            units.setdefault(parameter.unit, []).append(parameter)
        return {name: tuple(members) for name, members in units.items()}

    def reduce_dims(self, parameter: ParameterSpec) -> tuple[str, ...]:
        """Mesh dimensions over which this parameter's gradients differ and must be summed (design: an expert's
        gradient already holds its ep group's share, because the exchange brought those tokens)."""
        dims = ("replicate", "fsdp") if parameter.layout.is_expert else DATA_DIMS
        return self.mesh.live(dims)

    @property
    def grad_divisor(self) -> float:
        """The one divisor of every gradient: the number of data ranks for "mean", 1 for "sum"."""
        return float(self.mesh.data_ranks) if self.grad_reduce == "mean" else 1.0
