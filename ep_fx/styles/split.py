"""Parameters of experts as DTensors on the dimensions that a style splits over.

    ep      [E, ...]                   Shard(0)
    tp      w1, w3 [E, hidden, dim]    Shard(1)         w2 [E, dim, hidden]    Shard(2)

Everything is checked before anything is changed. A parameter that `fully_shard` holds already is gathered, cut, and
handed back to it, one at a time.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ep_fx.styles import _fsdp

_TP_DIMS = {"w1": 1, "w3": 1, "w2": 2}


def split_names(experts: nn.Module, num_experts: int) -> list[str]:
    """The parameters of `experts` whose dim 0 counts them."""
    own = experts.named_parameters(recurse=False)
    return [leaf for leaf, parameter in own if parameter.dim() and parameter.shape[0] == num_experts]


def check_split(path: str, experts: nn.Module, names: Sequence[str], num_experts: int, mesh: DeviceMesh) -> None:
    """Checks that the parameters of `experts` can be split over `mesh`, whose dimensions are those of the style.

    Raises:
        ValueError: sizes that cannot be divided, parameters that have no place on ``tp``, or that are split or sharded
            in a way that does not go together with this.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if num_experts % sizes.get("ep", 1):
        raise ValueError(
            f"{path}: {num_experts} experts cannot be divided over the mesh dimension 'ep' of size {sizes['ep']}; "
            f"accepted sizes: {_divisors(num_experts)}"
        )
    for leaf in names:
        parameter = experts.get_parameter(leaf)
        if "tp" in sizes:
            _check_tp(path, leaf, parameter, sizes["tp"])
        _check_owner(path, experts, leaf, parameter, mesh)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _check_tp(path: str, leaf: str, parameter: Tensor, tp: int) -> None:
    if leaf not in _TP_DIMS or parameter.dim() != 3:
        raise ValueError(
            f"{path}.{leaf} {tuple(parameter.shape)}: splitting experts over 'tp' needs the parameters w1, w3 "
            "[E, hidden, dim] and w2 [E, dim, hidden] and no others; ep_fx.ExpertParallel() takes any [E, ...]"
        )
    hidden = parameter.shape[_TP_DIMS[leaf]]
    if hidden % tp:
        raise ValueError(
            f"{path}.{leaf} {tuple(parameter.shape)}: {hidden} hidden features cannot be divided over the mesh "
            f"dimension 'tp' of size {tp}; accepted sizes: {_divisors(hidden)}"
        )


def _check_owner(path: str, experts: nn.Module, leaf: str, parameter: Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(parameter, DTensor):
        return
    sharded = _fsdp.find(experts, leaf)
    if sharded is None:
        raise ValueError(
            f"{path}.{leaf} is a DTensor {parameter.placements} on {parameter.device_mesh} that another parallelism "
            "made; apply the style to plain parameters, or to those that fully_shard holds"
        )
    common = _fsdp.ranks_of(sharded) & set(mesh.mesh.flatten().tolist())
    if len(common) > 1:
        raise ValueError(
            f"{path}.{leaf} is sharded by fully_shard over ranks {sorted(_fsdp.ranks_of(sharded))}, of which "
            f"{sorted(common)} are those of the mesh dimensions {mesh.mesh_dim_names} that the style splits over; call "
            "fully_shard on the experts first, over other dimensions: fully_shard(moe.experts, mesh=mesh['fsdp'])"
        )
    if not _fsdp.same_root(sharded, mesh):
        raise ValueError(
            f"{path}.{leaf} is sharded by fully_shard over {parameter.device_mesh}, which is no part of the mesh that "
            "was given; slice both from one mesh: fully_shard(..., mesh=mesh['fsdp']), style.apply(..., mesh)"
        )
    if not _fsdp.is_sharded(sharded):
        raise ValueError(f"{path}.{leaf} is gathered by fully_shard now; call reshard() on the FSDP module first")


def split_parameters(experts: nn.Module, names: Sequence[str], mesh: DeviceMesh) -> None:
    """Puts DTensors in the place of the parameters `names` of `experts`; what `check_split` found good. Collective."""
    for leaf in names:
        parameter = experts.get_parameter(leaf)
        sharded = _fsdp.find(experts, leaf) if isinstance(parameter, DTensor) else None
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        twin = nn.Parameter(_cut(leaf, whole.detach(), mesh), requires_grad=parameter.requires_grad)
        if sharded is None:
            experts._parameters[leaf] = twin
        else:
            _fsdp.replace(sharded, twin)


def _cut(leaf: str, whole: Tensor, mesh: DeviceMesh) -> DTensor:
    local, placements = whole, []
    for index, name in enumerate(mesh.mesh_dim_names or ()):
        dim = 0 if name == "ep" else _TP_DIMS[leaf]
        size = whole.shape[dim] // mesh.size(index)
        local = local.narrow(dim, mesh.get_local_rank(index) * size, size)
        placements.append(Shard(dim))
    local = local.clone(memory_format=torch.contiguous_format)
    if not local.is_meta:
        local = local.to(mesh.device_type)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
