"""A mesh of any size in one process: ``fsdp=64,ep=16`` becomes a DeviceMesh whose other ranks do not exist."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ep_fx.cli.failure import Code, FailedError
from ep_fx.testing import fake_world


def parse_mesh(text: str, world: int | None = None) -> dict[str, int]:
    """Size of each dimension of ``fsdp=64,ep=16``, in this order.

    Args:
        world: number of ranks that the sizes must amount to; None: any.

    Raises:
        FailedError: not of this form, or another number of ranks.
    """
    sizes = _pairs(text, "--mesh", "dimensions and sizes, such as fsdp=64,ep=16")
    ranks = math.prod(sizes.values())
    if world is not None and ranks != world:
        rest = f"; add replicate={world // ranks}" if world % ranks == 0 and "replicate" not in sizes else ""
        raise FailedError(Code.INPUT, f"--mesh {text} has {ranks} ranks, --world says {world}{rest}")
    return sizes


def parse_sizes(text: str | None) -> dict[str, int]:
    """``s0=8,s1=4096`` as a mapping.

    Raises:
        FailedError: not of this form.
    """
    return {} if text is None else _pairs(text, "--sizes", "names and sizes, such as s0=8,s1=4096")


def _pairs(text: str, option: str, expected: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not size.isdigit() or int(size) < 1 or name in sizes:
            raise FailedError(Code.INPUT, f"{option} {text!r}: expected {expected}, got {part!r}")
        sizes[name] = int(size)
    return sizes


@contextmanager
def fake_mesh(sizes: dict[str, int]) -> Iterator[DeviceMesh]:
    """The mesh of `sizes` on the CPU, seen from rank 0; its process groups end with the context."""
    if dist.is_initialized():
        raise FailedError(Code.INPUT, "this process is a rank of a real process group; run ep-fx in one of its own")
    with fake_world(math.prod(sizes.values())):
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
