"""The token exchange of a group, tried once with known rows, before anything trains on it.

Some releases of the backend report an all-to-all of uneven or empty splits as done and leave zeros. So at `transform`
rank 0 sends three rows to rank 1 and gets one, all others send nothing and get nothing, and every row must arrive.

Private torch API used here: ``_resolve_process_group``, from the name of a group to the group.
"""
from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

c10d = torch.ops._c10d_functional
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
_WIDTH = 2
_FINE = "fine"
_TRIED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups whose exchange was seen to work."""


def probe(group_name: str, device: str, tell: Callable[[str], object]) -> None:
    """Tries the exchange of a group; collective over all ranks that `tell` reaches. Nothing where it was tried before.

    Args:
        group_name: of two ranks or more.
        device: where rows lie.
        tell: compares a line over the ranks, and raises on all of them where they differ; a rank that got what it
            should must not go on without one that did not.

    Raises:
        RuntimeError: rows did not arrive; names the backend and its version, what was sent and what came.
    """
    group = _resolve_process_group(GroupName(group_name))
    if group in _TRIED or dist.get_backend(group) == "fake":
        return
    found = [_try(group, group_name, device, dtype) for dtype in DTYPES]  # all: the others take part in each
    failure = next((text for text in found if text is not None), None)
    try:
        tell(failure or _FINE)
    finally:
        if failure is not None:
            raise RuntimeError(failure)
    _TRIED.add(group)


def splits(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows that a rank sends to each, and gets from each."""
    sent, received = [0] * size, [0] * size
    if rank == 0:
        sent[1], received[1] = 3, 1
    if rank == 1:
        sent[0], received[0] = 1, 3
    return sent, received


def _rows(sender: int, count: int, dtype: torch.dtype) -> Tensor:
    """Rows of a rank, none of them zero: bfloat16 has them exactly."""
    return (16 * sender + 1 + torch.arange(count * _WIDTH).view(count, _WIDTH)).to(dtype)


def _try(group: Any, name: str, device: str, dtype: torch.dtype) -> str | None:
    """What went wrong on this rank; None where nothing did."""
    rank, size = group.rank(), group.size()
    sent, received = splits(rank, size)
    want = _rows(1 - rank, sum(received), dtype)
    given = _rows(rank, sum(sent), dtype).to(device)
    got = c10d.wait_tensor(c10d.all_to_all_single(given, received, sent, name)).cpu()
    if got.shape == want.shape and torch.equal(got, want):
        return None
    return (
        f"the backend {dist.get_backend(group)!r} ({_version()}) cannot be trained on: in the all-to-all of group "
        f"{name!r} with send splits {sent} and receive splits {received}, {dtype}, rank {rank} of {size} expected the "
        f"rows {want.tolist()} and got {got.tolist()}; use another release of CANN and torch_npu"
    )


def _version() -> str:
    module = sys.modules.get("torch_npu")
    own = f"torch_npu {module.__version__}" if module is not None and hasattr(module, "__version__") else "no torch_npu"
    return f"{own}, torch {torch.__version__}"
