"""Process groups of the user's mesh, by the dimensions they span.

Private torch API used here, and only here: ``DeviceMesh._flatten`` (one group over ``fsdp`` and ``ep`` together; it
caches by name on the root mesh). The token exchange never shares a group with a gather: where ``fsdp`` has one rank,
dense parameters are gathered over the mesh's own ``ep`` group and the exchange gets a group of its own. Both are made
once for a mesh, so a second transform makes no new group.
"""
from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.graph import MESH_DIMS, MeshSpec

_EXCHANGE = "_ep_fx_exchange_group"


def mesh_spec(mesh: DeviceMesh, sizes: dict[str, int]) -> MeshSpec:
    """Names of the groups that the passes need: ``fsdp``, ``ep``, ``replicate``, ``fsdp x ep``, and the exchange's.

    Collective where ``ep`` has more than one rank: all ranks of the mesh must call it.
    """
    groups: dict[tuple[str, ...], str] = {}
    for dim in MESH_DIMS:
        if sizes.get(dim, 1) > 1:
            groups[(dim,)] = mesh.get_group(dim).group_name
    dense = tuple(dim for dim in ("fsdp", "ep") if sizes.get(dim, 1) > 1)
    if len(dense) == 2:
        groups[dense] = mesh[dense]._flatten("ep_fx_fsdp_ep").get_group().group_name
    exchange = _exchange_group(mesh) if dense == ("ep",) else ""
    return MeshSpec(sizes=dict(sizes), groups=groups, exchange=exchange)


def _exchange_group(mesh: DeviceMesh) -> str:
    """A group of the ranks along ``ep``, made by its members alone and kept on the mesh."""
    group = getattr(mesh, _EXCHANGE, None)
    if group is None:
        ranks = dist.get_process_group_ranks(mesh.get_group("ep"))
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc="ep_fx_exchange")
        setattr(mesh, _EXCHANGE, group)
    return str(group.group_name)
