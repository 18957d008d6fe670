"""Layout of each parameter, and the DTensor that holds a rank's shard of it.

    dense     [n, ...]   dim 0 over fsdp, then ep (uneven and empty shards allowed)
    expert    [E, ...]   dim 0 over ep; a rank's block [E/ep, ...] over fsdp on dim 0, or on dim 1 where E/ep < fsdp
    cut       [E, hidden, dim]   besides, the hidden features over tp, and fsdp takes another dimension
    0-dim                replicated

Private torch API used here, and only here: ``_StridedShard``, for dim 0 cut by ``ep`` first although ``fsdp`` stands
left of it in the mesh, as FSDP2 + TP use it, and for a gate's and an up-projection's weights in one parameter, each cut
by ``tp``.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ep_fx.graph import Layout


def make_layout(
    shape: tuple[int, ...], is_expert: bool, sizes: dict[str, int], tp_dim: int | None = None, tp_blocks: int = 1
) -> Layout:
    """The layout of a parameter of global `shape` on a mesh of `sizes`.

    Args:
        is_expert: dim 0 is split over ``ep``.
        tp_dim, tp_blocks: how ``tp`` cuts it (see `Layout`); it divides evenly.
    """
    fsdp, ep = sizes.get("fsdp", 1), sizes.get("ep", 1)
    full = shape if tp_dim is None else _divided(shape, tp_dim, sizes.get("tp", 1))
    if is_expert:
        full = _divided(full, 0, ep)
        others = [d for d in range(1, len(full)) if d != tp_dim]
        packed = tp_blocks > 1 and ep > 1  # DTensor reads one strided placement as an order, two not at all
        dim = others[0] if (packed or full[0] < fsdp) and others else 0
        cuts = _nested_cuts(full[dim], [fsdp])
    else:
        dim, packed = 0, False
        cuts = _nested_cuts(full[0], [fsdp, ep]) if full else (1,)
    dims = ("fsdp",) if is_expert else ("fsdp", "ep")
    live = tuple(d for d in dims if sizes.get(d, 1) > 1) if full else ()
    if not live or (packed and dim == 0):
        return Layout(shape, full, is_expert, (), 0, (full[0] if full else 1,), tp_dim, tp_blocks)
    return Layout(shape, full, is_expert, live, dim, cuts, tp_dim, tp_blocks)


def _divided(shape: tuple[int, ...], dim: int, parts: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])


def _nested_cuts(length: int, parts: list[int]) -> tuple[int, ...]:
    """Lengths of the pieces when `length` is chunked by each of `parts` in turn, as DTensor's ``Shard`` does."""
    if not parts:
        return (length,)
    chunk = -(-length // parts[0])
    pieces = [max(0, min(chunk, length - i * chunk)) for i in range(parts[0])]
    return tuple(cut for piece in pieces for cut in _nested_cuts(piece, parts[1:]))


def placements(layout: Layout, mesh: DeviceMesh) -> list[Placement]:
    """DTensor placements of `layout` on the dimensions of the user's mesh."""
    names = mesh.mesh_dim_names
    assert names is not None
    ep = mesh.size(names.index("ep")) if "ep" in names else 1
    result: list[Placement] = []
    for index, name in enumerate(names):
        if mesh.size(index) == 1:
            result.append(Replicate())
        elif name == "ep" and layout.is_expert:
            result.append(Shard(0))
        elif name == "tp" and layout.tp_dim is not None:
            packed = layout.tp_blocks > 1
            result.append(
                _StridedShard(layout.tp_dim, split_factor=layout.tp_blocks) if packed else Shard(layout.tp_dim)
            )
        elif name not in layout.gather_dims:
            result.append(Replicate())
        elif layout.is_expert and layout.shard_dim == 0 and ep > 1:
            result.append(_StridedShard(0, split_factor=ep))
        else:
            result.append(Shard(layout.shard_dim))
    return result


def _coordinate(mesh: DeviceMesh, dims: tuple[str, ...]) -> int:
    """Index of this rank within the group along `dims`."""
    index = 0
    for dim in dims:
        index = index * mesh[dim].size() + mesh[dim].get_local_rank()
    return index


def local_shard(full: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's shard of the global tensor `full`: a copy of its own, so that `full` can be freed."""
    names = mesh.mesh_dim_names or ()
    if layout.is_expert and "ep" in names:
        rows = layout.full_shape[0]
        full = full.narrow(0, _coordinate(mesh, ("ep",)) * rows, rows)
    if layout.tp_dim is not None:
        full = _part(full, layout, mesh)
    if layout.gather_dims:
        index = _coordinate(mesh, layout.gather_dims)
        full = full.narrow(layout.shard_dim, sum(layout.shard_sizes[:index]), layout.shard_sizes[index])
    return full.detach().clone(memory_format=torch.contiguous_format)


def as_dtensor(local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """The DTensor of global shape ``layout.shape`` whose shard on this rank is `local`; no communication."""
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements(layout, mesh), run_check=False, shape=torch.Size(layout.shape), stride=stride
    )


def shard_parameter(parameter: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    """The sharded twin of a full `parameter`; ``requires_grad`` is kept."""
    local = local_shard(parameter.detach(), layout, mesh)
    if local.device.type != "meta":
        local = local.to(mesh.device_type)
    return nn.Parameter(as_dtensor(local, layout, mesh), requires_grad=parameter.requires_grad)


def is_packed(layout: Layout, mesh: DeviceMesh) -> bool:
    """Whether a rank's part of the parameter is no box of it: a checkpoint, which writes boxes, cannot hold it so."""
    return layout.tp_dim is not None and layout.tp_blocks > 1 and mesh["tp"].size() > 1


def whole_over_tp(value: DTensor, mesh: DeviceMesh) -> DTensor:
    """`value`, the same on all ranks along ``tp``; collective over ``tp``."""
    names = mesh.mesh_dim_names or ()
    target = [Replicate() if name == "tp" else p for name, p in zip(names, value.placements, strict=True)]
    return value.redistribute(mesh, target)


def cut_over_tp(value: DTensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """The inverse of `whole_over_tp`; no communication. What is not whole over ``tp`` is returned as it is."""
    names = mesh.mesh_dim_names or ()
    if value.device_mesh != mesh or not isinstance(value.placements[names.index("tp")], Replicate):
        return value
    return as_dtensor(_part(value.to_local(), layout, mesh).contiguous(), layout, mesh)


def _part(full: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part along ``tp``."""
    assert layout.tp_dim is not None
    parts, index = mesh["tp"].size(), mesh["tp"].get_local_rank()
    blocks = full.chunk(layout.tp_blocks, layout.tp_dim)
    return torch.cat([block.chunk(parts, layout.tp_dim)[index] for block in blocks], layout.tp_dim)
