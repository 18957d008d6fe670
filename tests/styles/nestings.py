"""The ways in which a user puts an eager style and torch's `fully_shard` together on one MoE layer, by name."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import ep_fx
from ep_fx.styles import Style

Nesting = Callable[[nn.Module, Style, DeviceMesh], nn.Module]


@functools.cache
def own_mesh(**sizes: int) -> DeviceMesh:
    """A mesh that other tests do not share: `fully_shard` over two of its dimensions flattens them for good."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@functools.cache
def all_data_ranks(mesh: DeviceMesh) -> DeviceMesh:
    """``fsdp x ep`` as one dimension."""
    return mesh["fsdp", "ep"]._flatten("all")


def over_fsdp(mesh: DeviceMesh) -> DeviceMesh:
    """Where experts are sharded: ``fsdp``, and copied along ``replicate`` where there is one."""
    return mesh["replicate", "fsdp"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["fsdp"]


class Outer(nn.Module):
    """Something with an MoE layer inside; its parameters go by the layer's own names."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.moe.named_parameters(*args, **kwargs)


def _style_alone(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    return style.apply(moe, mesh)


def _style_then_fsdp(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    style.apply(moe, mesh)
    fully_shard(moe, mesh=over_fsdp(mesh))
    return moe


def _fsdp_then_style(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    fully_shard(moe, mesh=over_fsdp(mesh))
    return style.apply(moe, mesh)


def _fsdp_of_parts_then_style(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    for part in moe.children():
        fully_shard(part, mesh=over_fsdp(mesh))
    return style.apply(moe, mesh)


def _fsdp_around_the_moe(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    style.apply(moe, mesh)  # sees nothing of the unit that shards it
    fully_shard(outer := Outer(moe), mesh=over_fsdp(mesh))
    return outer


def _experts_then_dense_over_all(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    style.apply(moe.experts, mesh)
    fully_shard(moe.experts, mesh=over_fsdp(mesh))
    fully_shard(moe, mesh=all_data_ranks(mesh))
    return moe


def _dense_over_all_then_experts(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    fully_shard(moe.experts, mesh=over_fsdp(mesh))
    fully_shard(moe, mesh=all_data_ranks(mesh))
    style.apply(moe.experts, mesh)
    return moe


def _dense_over_all_and_the_whole(moe: nn.Module, style: Style, mesh: DeviceMesh) -> nn.Module:
    style.apply(moe, mesh)
    fully_shard(moe.experts, mesh=over_fsdp(mesh))
    fully_shard(moe, mesh=all_data_ranks(mesh))
    return moe


NESTINGS: Mapping[str, Nesting] = {
    "style on the MoE, then FSDP on it": _style_then_fsdp,
    "FSDP on the MoE, then style on it": _fsdp_then_style,
    "FSDP on router and experts apart, then style": _fsdp_of_parts_then_style,
    "style on the MoE, then FSDP around it": _fsdp_around_the_moe,
    "style on the experts, FSDP of all else over fsdp x ep": _experts_then_dense_over_all,
    "FSDP of all else over fsdp x ep, then style on the experts": _dense_over_all_then_experts,
    "style on the MoE, FSDP of all else over fsdp x ep": _dense_over_all_and_the_whole,
}
"""Those with FSDP over ``fsdp`` for the experts."""
ALONE: Nesting = _style_alone


def made(name: str, moe: nn.Module, mesh: DeviceMesh, style: Style | None = None) -> nn.Module:
    """`moe` under the nesting `name` (or ``"style alone"``) with `style`, by default EP."""
    nesting = ALONE if name == "style alone" else NESTINGS[name]
    return nesting(moe, style or ep_fx.ExpertParallel(), mesh)
