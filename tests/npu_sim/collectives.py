"""On two ranks: what `ep_fx.ops` and the lowered exchange ask of a process group, exact in every dtype.

Each function takes (rank, device, dtype) and returns what the collective gave and what it is to give. A rank's input
is a function of its number, so that each rank knows what the others sent.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.npu_sim.device import npu

RANKS = 2
Pairs = list[tuple[Tensor, Tensor]]
collectives = torch.ops._c10d_functional


def values(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small integers, exact in every dtype and in every sum of them."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 13 + 17 * rank).to(dtype)


def group() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def wait(tensor: Tensor) -> Tensor:
    result: Tensor = collectives.wait_tensor(tensor)
    return result


def exchange(rank: int, device: torch.device, dtype: torch.dtype, table: tuple[tuple[int, ...], ...]) -> Pairs:
    """all_to_all_single where rank s sends ``table[s][r]`` rows to rank r."""
    sent, received = list(table[rank]), [row[rank] for row in table]
    rows = [values(source, dtype, sum(table[source]), 3) for source in range(RANKS)]
    got = wait(collectives.all_to_all_single(rows[rank].to(device), received, sent, group()))
    parts = [rows[source].split(table[source])[rank] for source in range(RANKS)]
    return [(got, torch.cat(parts))]


def _uneven(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    return exchange(rank, device, dtype, ((2, 3), (1, 4)))


def _one_row_against_three(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    return exchange(rank, device, dtype, ((0, 3), (1, 0)))


def _nothing_to_one_rank(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    return exchange(rank, device, dtype, ((4, 0), (5, 0)))


def _nothing_at_all(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    return exchange(rank, device, dtype, ((0, 0), (0, 0)))


def _counts(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    """One number for each expert, in a vector."""
    sent = [values(source, dtype, 4) for source in range(RANKS)]
    got = wait(collectives.all_to_all_single(sent[rank].to(device), [2, 2], [2, 2], group()))
    return [(got, torch.cat([vector.chunk(RANKS)[rank] for vector in sent]))]


def _all_gather(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    mine = values(rank, dtype, 3, 2).to(device)
    got = wait(collectives.all_gather_into_tensor(mine, RANKS, group()))
    return [(got, torch.cat([values(source, dtype, 3, 2) for source in range(RANKS)]))]


SHAPES = ((4, 3), (2,), (6, 1, 2))


def _all_gather_coalesced(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    mine = [values(rank, dtype, *shape).to(device) for shape in SHAPES]
    got = collectives.all_gather_into_tensor_coalesced(mine, RANKS, group())
    wanted = [torch.cat([values(source, dtype, *shape) for source in range(RANKS)]) for shape in SHAPES]
    return [(wait(one), other) for one, other in zip(got, wanted, strict=True)]


def _reduce_scatter_coalesced(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    mine = [values(rank, dtype, *shape).to(device) for shape in SHAPES]
    got = collectives.reduce_scatter_tensor_coalesced(mine, "sum", RANKS, group())
    return [(wait(one), _sum(dtype, shape).chunk(RANKS)[rank]) for one, shape in zip(got, SHAPES, strict=True)]


def _all_reduce_coalesced(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    mine = [values(rank, dtype, *shape).to(device) for shape in SHAPES]
    got = collectives.all_reduce_coalesced(mine, "sum", group())
    return [(wait(one), _sum(dtype, shape)) for one, shape in zip(got, SHAPES, strict=True)]


def _all_reduce(rank: int, device: torch.device, dtype: torch.dtype) -> Pairs:
    got = wait(collectives.all_reduce(values(rank, dtype, 5).to(device), "sum", group()))
    return [(got, _sum(dtype, (5,)))]


def _sum(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.stack([values(source, dtype, *shape) for source in range(RANKS)]).sum(0).to(dtype)


CASES: dict[str, Callable[[int, torch.device, torch.dtype], Pairs]] = {
    "uneven": _uneven,
    "one_row_against_three": _one_row_against_three,
    "nothing_to_one_rank": _nothing_to_one_rank,
    "nothing_at_all": _nothing_at_all,
    "counts": _counts,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "reduce_scatter_coalesced": _reduce_scatter_coalesced,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_reduce": _all_reduce,
}


def run(rank: int, case: str, dtype: torch.dtype) -> None:
    """Runs one case through the real ProcessGroupHCCL; bits are compared."""
    device = npu(rank)
    for got, wanted in CASES[case](rank, device, dtype):
        assert got.device == device
        assert torch.equal(got.cpu(), wanted), (got.cpu(), wanted)
