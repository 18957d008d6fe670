"""Process groups of the user's mesh, by the dimensions they span.

Private torch API used here, and only here: ``DeviceMesh._flatten`` (one group over ``fsdp`` and ``ep`` together).
It caches by name on the root mesh, so a second transform on the same mesh makes no second group.
"""
from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ep_fx.graph import MESH_DIMS, MeshSpec


def mesh_spec(mesh: DeviceMesh, sizes: dict[str, int]) -> MeshSpec:
    """Names of the groups that the passes need: ``fsdp``, ``ep``, ``replicate`` and ``fsdp x ep``.

    Collective where ``fsdp`` and ``ep`` both have more than one rank: all ranks of the mesh must call it.
    """
    groups: dict[tuple[str, ...], str] = {}
    for dim in MESH_DIMS:
        if sizes.get(dim, 1) > 1:
            groups[(dim,)] = mesh.get_group(dim).group_name
    dense = tuple(dim for dim in ("fsdp", "ep") if sizes.get(dim, 1) > 1)
    if len(dense) == 2:
        groups[dense] = mesh[dense]._flatten("ep_fx_fsdp_ep").get_group().group_name
    return MeshSpec(sizes=dict(sizes), groups=groups)
