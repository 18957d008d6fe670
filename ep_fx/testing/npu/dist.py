"""`hccl` on the npu device of `device.py`: the collectives of gloo, on the host's view of the tensors.

Unlike the real backend it takes tensors on the CPU too: on these the collectives run.
"""
from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_fx.testing.npu.device import run
from ep_fx.testing.npu.memory import DEVICE_TYPE
from ep_fx.testing.npu.reference.exchange import Exchange

BACKEND = "hccl"
_LIBRARIES: list[torch.library.Library] = []
_GROUPS: dict[str, ProcessGroupHCCL] = {}
"""By the name of the communicator. Held, so that PyTorch finds the Python object of a group again."""


class ProcessGroupHCCL(dist.ProcessGroupGloo):
    """What ``group._get_backend(torch.device("npu"))`` gives."""

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """The name by which kernels that communicate find the group."""
        return next(name for name, group in _GROUPS.items() if group is self)


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


def exchange_of(hcom: str, size: int) -> Exchange:
    """The all-to-all of the group with this communicator, on CPU tensors.

    Raises:
        ValueError: there is no such group, or it has another number of ranks.
    """
    group = _GROUPS.get(hcom)
    if group is None or group.size() != size:
        found = "no such group" if group is None else f"a group of {group.size()}"
        raise ValueError(f"expected the communicator of a group of {size} ranks, got {hcom!r}, {found}")

    def exchange(rows: Tensor, input_splits: list[int], output_splits: list[int]) -> Tensor:
        received = rows.new_empty(sum(output_splits), rows.size(1))
        work = group.alltoall_base(received, rows.contiguous(), output_splits, input_splits)  # type: ignore[attr-defined]
        work.wait()
        return received

    return exchange


def _group(options: Any, backend_options: Any = None) -> ProcessGroupHCCL:
    group = ProcessGroupHCCL(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    _GROUPS[f"hccl_{len(_GROUPS)}"] = group
    return group
