"""What each rank does first, on stand-ins for CANN and on NPUs alike."""
from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ep_fx.testing.npu.cann.simulate import install


def simulated() -> bool:
    """Whether this process has stand-ins for CANN, and no NPU."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any((Path(folder) / "libcann_stub.so").exists() for folder in folders if folder)


@functools.cache
def npu(rank: int) -> torch.device:
    """This rank's npu; its default group is now one of the real ProcessGroupHCCL, the pool's gloo group is gone."""
    if simulated():
        install()
    size, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", store=dist.PrefixStore("hccl", store), rank=rank, world_size=size)
    return torch.device("npu", rank)


@functools.cache
def npu_mesh(**sizes: int) -> DeviceMesh:
    """The mesh of all ranks with these dimensions, one object per rank and shape; same order on every rank."""
    npu(dist.get_rank())
    return init_device_mesh("npu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
