"""`hccl` on the npu device of `device.py`: the collectives of gloo, on the host's view of the tensors.

Unlike the real backend it takes tensors on the CPU too: on these the collectives run.
"""
from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist

from ep_fx.testing.npu.device import run
from ep_fx.testing.npu.memory import DEVICE_TYPE

BACKEND = "hccl"
_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Registers the backend ``hccl``; again is harmless."""
    if _LIBRARIES:
        return
    dist.Backend.register_backend(BACKEND, _group, extended_api=True, devices=[DEVICE_TYPE, "cpu"])
    library = torch.library.Library("c10d", "IMPL")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and has(name, "CPU"):
                op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
                library.impl(op, functools.partial(run, op, op), "PrivateUse1")
    _LIBRARIES.append(library)


def _group(options: Any, backend_options: Any = None) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
