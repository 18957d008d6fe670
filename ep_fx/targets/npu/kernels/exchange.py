"""Exchange and grouped product as one kernel, on A3: `npu_alltoallv_gmm` on the way to the experts, and its mirror.

    to the experts     y, rows = rows_of(x) @ weight         x by rank, then expert     rows by local expert, then rank
    from the experts   y = back(x @ weight)                  x by local expert, then rank

The backward of each is the other with the weight transposed; `rows` serve the gradient of the weight. Counts are host
integers ``[ep * E/ep]`` by rank of the peer, then expert of the rank that computes. A rank without rows calls the
kernel too: its peers wait for it.

Private torch API used here: ``_resolve_process_group`` and ``ProcessGroup._get_backend``, for the communicator.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import GroupName

from ep_fx.ops.context import check_rows
from ep_fx.targets.npu.kernels.registry import call, composition, kernel, looking


class ExchangeContext(NamedTuple):
    """What one dispatch leaves to its combine where the kernels do the exchange; see `ep_fx.DispatchContext`.

    Args:
        send_counts: rows sent, by rank, then expert of that rank.
        recv_counts: rows received, by rank, then local expert.
        input_splits: rows sent to each rank.
        input_shape: ``(num_rows,)``, rows before dispatch, those that no expert takes included.
        tokens_per_expert: ``[E/ep]``, int64, rows received for each local expert.
    """

    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    input_splits: tuple[int, ...]
    input_shape: tuple[int, ...]
    tokens_per_expert: Tensor


@composition
def exchange_context(
    tokens_per_expert: Tensor, counts_done: Tensor, num_rows: int, ep_size: int, region: str
) -> ExchangeContext:
    """The context of one dispatch; the only place where a region waits for the device.

    Arguments and errors as of the dialect's `ep_fx.dispatch_context`.
    """
    both = torch.cat((tokens_per_expert.reshape(-1), counts_done.reshape(-1))).tolist()
    half = len(both) // 2
    sent, received = tuple(both[:half]), tuple(both[half:])
    local = half // ep_size
    splits = tuple(sum(sent[start : start + local]) for start in range(0, half, local))
    check_rows(sum(splits), num_rows, region)
    return ExchangeContext(sent, received, splits, (num_rows,), counts_done.view(ep_size, local).sum(0))


exchange_context.results = ExchangeContext._fields  # type: ignore[attr-defined]


def communicator(group: str) -> str:
    """The name by which a kernel finds the communicator of a process group."""
    if looking():
        return group
    found = _resolve_process_group(GroupName(group))
    backend = found._get_backend(torch.device("npu"))
    rank = dist.get_global_rank(found, found.rank())
    return cast(str, backend.get_hccl_comm_name(rank))  # type: ignore[attr-defined]


def _rows(x: Tensor, counts: Sequence[int]) -> int:
    """How many rows come; of counts that only a run knows a size of its own."""
    if None not in counts:
        return sum(counts)
    assert isinstance(x, FakeTensor)
    env = x.fake_mode.shape_env
    assert env is not None
    return cast(int, env.create_unbacked_symint())


def _width(weight: Tensor, transposed: bool) -> int:
    return weight.shape[1 if transposed else 2]


def _to_experts_fake(
    x: Tensor, weight: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: str, transposed: bool
) -> tuple[Tensor, Tensor]:
    rows = _rows(x, recv_counts)
    return x.new_empty((rows, _width(weight, transposed))), x.new_empty((rows, x.shape[1]))


@kernel(fake=_to_experts_fake, results=("y", "rows"))
def npu_alltoallv_gmm(
    x: Tensor, weight: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: str, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Rows to the ranks of their experts, and there through the experts' matrices.

    Args:
        x: ``[A, K]``, fp16 or bf16, by rank, then expert.
        weight: ``[e, K, N]``, or ``[e, N, K]`` if `transposed`; in the dtype of `x`.
        send_counts, recv_counts: rows to and from each rank, for each of its (this rank's) experts.
        group: name of the process group.

    Returns:
        y ``[R, N]`` and rows ``[R, K]``, by local expert, then rank.
    """
    size = len(send_counts) // weight.shape[0]
    y, _, rows = call(
        "npu_alltoallv_gmm", x.contiguous(), weight.contiguous(), communicator(group), size, list(send_counts),
        list(recv_counts), trans_gmm_weight=transposed, permute_out_flag=True,
    )  # fmt: skip
    return y, rows


def _from_experts_fake(
    x: Tensor, weight: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: str, transposed: bool
) -> Tensor:
    return x.new_empty((_rows(x, recv_counts), _width(weight, transposed)))


@kernel(fake=_from_experts_fake)
def npu_gmm_alltoallv(
    x: Tensor, weight: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: str, transposed: bool
) -> Tensor:
    """Rows through the matrices of this rank's experts, and back to the ranks that they came from.

    Args:
        x: ``[R, K]``, fp16 or bf16, by local expert, then rank.
        weight: as of `npu_alltoallv_gmm`.
        send_counts: rows that go back to each rank, from each local expert.
        recv_counts: rows that come back from each rank, from each of its experts.
        group: name of the process group.

    Returns:
        ``[A, N]``, by rank, then expert.
    """
    size = len(send_counts) // weight.shape[0]
    y, _ = call(
        "npu_gmm_alltoallv", x.contiguous(), weight.contiguous(), communicator(group), size, list(send_counts),
        list(recv_counts), trans_gmm_weight=transposed,
    )  # fmt: skip
    return cast(Tensor, y)
