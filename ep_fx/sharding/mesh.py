"""Process groups of the user's mesh, by the dimensions they span.

Private torch API used here, and only here: ``DeviceMesh._flatten``, which makes a group and caches it by name on the
root mesh, so that a second transform makes none. One group spans ``fsdp`` and ``ep`` together. The token exchange
never shares a group with a gather: where ``fsdp`` has one rank, dense parameters are gathered over the mesh's own
``ep`` group and the exchange gets a group of its own.
"""
from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.graph import MESH_DIMS, MeshSpec


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
    """A second group of the ranks along ``ep``.

    Named like every group of a mesh, by how many were made before: ``new_group(use_local_synchronization=True)`` would
    name it by how many groups this rank is in, and hang where its peers are in another number of them.
    """
    backend = dist.get_backend_config(mesh.get_group("ep"))
    return str(mesh["ep"]._flatten("ep_fx_exchange", backend_override=backend).get_group().group_name)
