"""Meshes of any size in one process: the ranks are there by number, and never communicate.

A model can be transformed on such a mesh and its graph read; nothing that runs on it is right. Private torch API used
here, and only here: ``torch.testing._internal.distributed.fake_pg``.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ep_fx.graph import MESH_DIMS

_DIMS = ("pp", *MESH_DIMS)


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """`size` ranks, of which this process is number `rank`, that never communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_mesh(*, rank: int = 0, device: str = "cpu", **sizes: int) -> Iterator[DeviceMesh]:
    """The mesh with these dimensions, seen from `rank`, for the time of a ``with`` block; see `FakeMeshes`."""
    meshes = FakeMeshes()
    try:
        yield meshes(rank=rank, device=device, **sizes)
    finally:
        meshes.close()


class FakeMeshes:
    """Makes fake meshes; one world at a time, and none is left after `close`."""

    def __init__(self) -> None:
        self._world: tuple[int, int] | None = None

    def __call__(self, *, rank: int = 0, device: str = "cpu", **sizes: int) -> DeviceMesh:
        """The mesh with these dimensions, e.g. ``ep_fake_mesh(fsdp=64, ep=16)``, seen from `rank`.

        A call for another number of ranks, or another rank, ends the world of the meshes made before; graphs captured
        on those can still be read.

        Raises:
            ValueError: an unknown dimension, a size below 1, a rank outside, or a process group of somebody else.
        """
        _check(rank, sizes)
        world = (math.prod(sizes.values()), rank)
        if self._world != world:
            self.close()
            if dist.is_initialized():
                raise ValueError(
                    f"this process has a {dist.get_backend()} process group of {dist.get_world_size()} ranks already; "
                    "ep_fake_mesh makes its own: call it where no other one is alive (not on ranks)"
                )
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world[0])
            self._world = world
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def close(self) -> None:
        """Ends the world of the meshes made so far."""
        if self._world is not None:
            self._world = None
            dist.destroy_process_group()


def _check(rank: int, sizes: dict[str, int]) -> None:
    unknown = [name for name in sizes if name not in _DIMS]
    if unknown or not sizes:
        raise ValueError(f"mesh dimensions are {', '.join(_DIMS)}, got {', '.join(unknown) or 'none'}")
    ordered = sorted(sizes, key=_DIMS.index)
    if list(sizes) != ordered:
        raise ValueError(f"mesh dimensions stand in the order {', '.join(ordered)}, got {', '.join(sizes)}")
    small = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    world = math.prod(sizes.values())
    if small or not 0 <= rank < world:
        raise ValueError(f"expected sizes of 1 and more and a rank below their product, got {small or f'rank={rank}'}")
