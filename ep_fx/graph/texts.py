"""Short texts for people: operators, process groups, the mesh, layouts."""
from __future__ import annotations

import torch
from torch import fx

from ep_fx.graph.manifest import Layout, MeshSpec, ParameterSpec

_NAMESPACES = {"_c10d_functional": "c10d", "_c10d_functional_autograd": "c10d_autograd"}


def target_text(node: fx.Node) -> str:
    """``aten.mm``, ``aten.add.Tensor``, ``ep_fx.unshard``, ``c10d.all_to_all_single``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        overload = f".{target._overloadname}" if target._overloadname != "default" else ""
        return f"{_NAMESPACES.get(namespace, namespace)}.{name}{overload}"
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def group_text(group: str, mesh: MeshSpec) -> str:
    """The mesh dimensions that a process group spans, its name where it is none of the mesh's."""
    dims = mesh.dims_of(group)
    return group if dims is None else ",".join(dims)


def mesh_text(mesh: MeshSpec) -> str:
    """``fsdp 2 x ep 2, 4 data ranks``."""
    sizes = " x ".join(f"{dim} {size}" for dim, size in mesh.sizes.items()) or "1 rank"
    return f"{sizes}, {plural(mesh.data_ranks, 'data rank')}"


def layout_text(layout: Layout) -> str:
    """``[8, 64] of [16, 64] over ep, dim 1 cut 2 x 32 over fsdp``."""
    shape, full = list(layout.shape), list(layout.full_shape)
    text = f"{full} of {shape} over ep" if layout.is_expert and full != shape else f"{shape}"
    if not layout.gather_dims:
        return f"{text}, whole"
    sizes = layout.shard_sizes
    cuts = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    return f"{text}, dim {layout.shard_dim} cut {cuts} over {','.join(layout.gather_dims)}"


def parameter_text(spec: ParameterSpec) -> str:
    """Layout and unit of a parameter, and whether it is frozen."""
    return f"{layout_text(spec.layout)}; unit {spec.unit}{'' if spec.trainable else '; frozen'}"


def block_of(fqn: str) -> str:
    """`fqn` up to its first index (``model.layers.0``), or its first two components where it has none."""
    parts = fqn.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: index + 1] if index is not None else parts[:2])


def plural(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def source_text(source: str) -> str:
    """``file.py:12``: a source line without its folder, which differs between machines."""
    return source.replace("\\", "/").rsplit("/", 1)[-1]
