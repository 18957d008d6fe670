"""Short texts for people: process groups, the mesh, layouts."""
from __future__ import annotations

import itertools
from collections.abc import Sequence

from ep_fx.graph.manifest import Layout, MeshSpec, ParameterSpec


def group_text(group: str, mesh: MeshSpec) -> str:
    """The mesh dimensions that a process group spans, its name where it is none of the mesh's."""
    dims = mesh.dims_of(group)
    return group if dims is None else ",".join(dims)


def mesh_text(mesh: MeshSpec) -> str:
    """``fsdp 2 x ep 2, 4 data ranks``."""
    sizes = " x ".join(f"{dim} {size}" for dim, size in mesh.sizes.items()) or "1 rank"
    return f"{sizes}, {plural(mesh.data_ranks, 'data rank')}"


def layout_text(layout: Layout) -> str:
    """``[8, 64] of [16, 64] over ep, dim 1 cut 2 x 32 over fsdp``; says all that `layout` says."""
    shape, full, sizes = list(layout.shape), list(layout.full_shape), layout.shard_sizes
    text = f"{full}{f' of {shape}' if full != shape else ''}{' over ep' if layout.is_expert else ''}"
    if layout.tp_dim is not None:
        blocks = f" in {layout.tp_blocks} blocks" if layout.tp_blocks > 1 else ""
        text += f", dim {layout.tp_dim} over tp{blocks}"
    if (layout.gather_dims, layout.shard_dim, list(sizes)) == ((), 0, full[:1] or [1]):
        return f"{text}, whole"
    return f"{text}, dim {layout.shard_dim} cut {_cuts_text(sizes)} over {','.join(layout.gather_dims)}"


def _cuts_text(sizes: Sequence[int]) -> str:
    """``3 x 16 + 10``: the lengths in order, equal neighbours together, whatever their number."""
    runs = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    return " + ".join(f"{times} x {size}" if times > 1 or len(runs) == 1 else str(size) for size, times in runs)


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
