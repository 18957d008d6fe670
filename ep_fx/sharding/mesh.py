"""Process groups of the user's mesh, by the dimensions they span.

One group spans ``fsdp`` and ``ep`` together. The token exchange never shares a group with a gather: where ``fsdp`` has
one rank, dense parameters are gathered over the mesh's own ``ep`` group and the exchange gets a group of its own.

Private torch API used here, and only here: ``DeviceMesh._flatten``, ``_get_root_mesh`` and ``_flatten_mapping``. A
flattened mesh is taken out of the mapping again: while it is there, DTensor gathers ``[Shard(0), Shard(0)]`` over it
in one step, as if the rows were cut evenly over all ranks, and ``full_tensor()`` of uneven rows is wrong.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.graph import MESH_DIMS, MeshSpec

_GROUPS = "_ep_fx_groups"
_FSDP_EP, _EXCHANGE = "ep_fx_fsdp_ep", "ep_fx_exchange"


def mesh_spec(mesh: DeviceMesh, sizes: dict[str, int]) -> MeshSpec:
    """Names of the groups that the passes need: ``fsdp``, ``ep``, ``replicate``, ``fsdp x ep``, and the exchange's.

    Collective where ``ep`` has more than one rank: all ranks of the mesh, and of the mesh that it was sliced from, must
    call it.
    """
    groups: dict[tuple[str, ...], str] = {}
    for dim in MESH_DIMS:
        if sizes.get(dim, 1) > 1:
            groups[(dim,)] = mesh.get_group(dim).group_name
    dense = tuple(dim for dim in ("fsdp", "ep") if sizes.get(dim, 1) > 1)
    if len(dense) == 2:
        groups[dense] = _group(mesh, dense, _FSDP_EP)
    exchange = _exchange_group(mesh) if dense == ("ep",) else ""
    return MeshSpec(sizes=dict(sizes), groups=groups, exchange=exchange)


def stages_to_join(mesh: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh | None:
    """The mesh of all pipeline stages, where `mesh` is the submesh of one and `mesh_spec` is about to make groups.

    A group is made by all ranks of the whole mesh, members or not: a stage that stops before leaves the others waiting.
    """
    root = mesh._get_root_mesh()
    first = _FSDP_EP if sizes.get("fsdp", 1) > 1 else _EXCHANGE
    due = sizes.get("ep", 1) > 1 and first not in root.__dict__.get(_GROUPS, {})
    return root if due and root.size() > mesh.size() else None


def _exchange_group(mesh: DeviceMesh) -> str:
    """A second group of the ranks along ``ep``.

    Named like every group of a mesh, by how many were made before: ``new_group(use_local_synchronization=True)`` would
    name it by how many groups this rank is in, and hang where its peers are in another number of them.
    """
    backend = dist.get_backend_config(mesh.get_group("ep"))
    return _group(mesh, ("ep",), _EXCHANGE, backend_override=backend)


def _group(mesh: DeviceMesh, dims: tuple[str, ...], name: str, **options: Any) -> str:
    """Name of a group of its own along `dims`, made once for a mesh: a second transform finds it on the root mesh."""
    root = mesh._get_root_mesh()
    made: dict[str, DeviceMesh] = root.__dict__.setdefault(_GROUPS, {})
    if name not in made:
        made[name] = mesh[dims]._flatten(name, **options)
        del root._flatten_mapping[name]
    return str(made[name].get_group().group_name)
