"""The two kernels that fuse an all-to-all with a grouped product, by an exchange that the caller provides.

Counts are ``[W * e]`` rows by peer rank, then by expert of the rank that computes: expert e of peer w is at
``w * e_local + e`` ([OPP] npu_alltoallv_gmm.md, npu_gmm_alltoallv.md). Between exchange and product rows are ordered by
local expert, then by source rank. The sizes of the groups are those of the rows that the expert's rank holds, received
by the first kernel and sent by the second: the examples in [OPP] take the other count, right only where routing is
balanced.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ep_fx.testing.npu.reference.matmul import npu_grouped_matmul

Exchange = Callable[[Tensor, list[int], list[int]], Tensor]
"""``exchange(rows, input_splits, output_splits)``: the rows received."""


def npu_alltoallv_gmm(
    exchange: Exchange,
    gmm_x: Tensor,
    gmm_weight: Tensor,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    trans_gmm_weight: bool = False,
    permute_out_flag: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rows go to their experts' ranks and through the experts' weights.

    Args:
        gmm_x: ``[A, K]``, by rank, then expert.
        gmm_weight: ``[e, K, N]``, or ``[e, N, K]`` with `trans_gmm_weight`.
        send_counts, recv_counts: ``[W * e]``.

    Returns:
        ``[R, N]`` by local expert, then rank; and, with `permute_out_flag`, the rows ``[R, K]`` in this order.
    """
    received = exchange(gmm_x, _by_rank(send_counts, ep_world_size), _by_rank(recv_counts, ep_world_size))
    rows = received.index_select(0, _by_expert(recv_counts, ep_world_size))
    y = _product(rows, gmm_weight, recv_counts, ep_world_size, trans_gmm_weight)
    return y, rows if permute_out_flag else None


def npu_gmm_alltoallv(
    exchange: Exchange,
    gmm_x: Tensor,
    gmm_weight: Tensor,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    trans_gmm_weight: bool = False,
) -> Tensor:
    """Rows, by local expert, then rank, go through the experts' weights and back to their ranks: the mirror of
    `npu_alltoallv_gmm`, and its gradient with counts swapped and the weight transposed.

    Returns:
        ``[A, N]`` by rank, then expert.
    """
    y = _product(gmm_x, gmm_weight, send_counts, ep_world_size, trans_gmm_weight)
    back = torch.empty_like(y)
    back[_by_expert(send_counts, ep_world_size)] = y
    return exchange(back, _by_rank(send_counts, ep_world_size), _by_rank(recv_counts, ep_world_size))


def _by_rank(counts: list[int], world_size: int) -> list[int]:
    return torch.tensor(counts, dtype=torch.int64).view(world_size, -1).sum(1).tolist()


def _by_expert(counts: list[int], world_size: int) -> Tensor:
    """Where each row by expert, then rank, stands among the rows by rank, then expert."""
    blocks = list(torch.arange(sum(counts)).split(counts))
    experts = len(counts) // world_size
    return torch.cat([blocks[rank * experts + expert] for expert in range(experts) for rank in range(world_size)])


def _product(x: Tensor, weight: Tensor, counts: list[int], world_size: int, transposed: bool) -> Tensor:
    sizes = torch.tensor(counts, dtype=torch.int64).view(world_size, -1).sum(0)
    operand = weight.mT if transposed else weight
    return npu_grouped_matmul(
        [x], [operand], group_list=sizes, split_item=3, group_type=0, group_list_type=1
    )[0]
