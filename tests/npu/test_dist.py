"""Collectives of the backend hccl on the npu device of the tests, forward and backward, on 4 ranks (R14)."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from ep_fx.testing.ranks import RankPool, local_mesh

SENT = {"some": ((0, 3, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)), "none": ((0, 0, 0, 0),) * 4}
"""Rows from each rank (outer) to each rank (inner)."""


def _rows(sender: int, count: int, dtype: torch.dtype) -> Tensor:
    return (10 * sender + torch.arange(2 * count).view(-1, 2)).to(dtype)


def _exchange(rank: int, table: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    sent, received = list(table[rank]), [row[rank] for row in table]
    x = _rows(rank, sum(sent), dtype).to("npu")
    want = torch.cat([_rows(sender, count, dtype) for sender, count in enumerate(received)])
    y = torch.empty(sum(received), 2, dtype=dtype, device="npu")
    work = dist.all_to_all_single(y, x, received, sent, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(y.cpu(), want)
    name = dist.group.WORLD.group_name
    functional = torch.ops._c10d_functional.all_to_all_single(x, received, sent, name)
    assert torch.equal(torch.ops._c10d_functional.wait_tensor(functional).cpu(), want)
    if not dtype.is_floating_point:
        return
    x.requires_grad_()
    z = collectives.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)
    (z * (rank + 2)).sum().backward()  # what comes back tells where it has been
    receivers = torch.repeat_interleave(torch.arange(4), torch.tensor(sent)) + 2
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), receivers.to(dtype).unsqueeze(1).expand(-1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("table", SENT)
def test_r14_exchange_of_uneven_and_of_no_rows(npu_ranks: RankPool, table: str, dtype: torch.dtype) -> None:
    npu_ranks.run(_exchange, SENT[table], dtype)


def _reductions(rank: int) -> None:
    name, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
    x = torch.arange(8.0, device="npu") * (rank + 1)
    wait = ops.wait_tensor
    whole = torch.arange(8.0) * 10
    assert torch.equal(wait(ops.all_reduce(x, "sum", name)).cpu(), whole)
    assert torch.equal(wait(ops.reduce_scatter_tensor(x, "sum", 4, name)).cpu(), whole[2 * rank : 2 * rank + 2])
    parts = ops.reduce_scatter_tensor_coalesced([x, 2 * x[:4]], "sum", 4, name)
    assert torch.equal(wait(parts[0]).cpu(), whole[2 * rank : 2 * rank + 2])
    assert torch.equal(wait(parts[1]).cpu(), 2 * whole[rank : rank + 1])
    both = ops.all_reduce_coalesced([x, 2 * x[:1]], "sum", name)
    assert [wait(part).tolist() for part in both] == [whole.tolist(), [0]]
    x.mul_(-1)
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), -whole)


def _gathers(rank: int) -> None:
    name, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
    shard = torch.tensor([rank, -rank], device="npu")
    whole = torch.tensor([0, 0, 1, -1, 2, -2, 3, -3])
    assert torch.equal(ops.wait_tensor(ops.all_gather_into_tensor(shard, 4, name)).cpu(), whole)
    gathered = ops.all_gather_into_tensor_coalesced([shard, shard[:1]], 4, name)
    assert torch.equal(ops.wait_tensor(gathered[0]).cpu(), whole)
    assert ops.wait_tensor(gathered[1]).tolist() == [0, 1, 2, 3]
    said: list[str | None] = [None] * 4
    dist.all_gather_object(said, f"rank {rank}")
    assert said == [f"rank {sender}" for sender in range(4)]


def _meshes(rank: int) -> None:
    mesh = local_mesh(fsdp=2, ep=2)
    assert (mesh.device_type, dist.get_backend(mesh.get_group("ep"))) == ("npu", "hccl")
    tensor = distribute_tensor(torch.arange(5.0, device="npu"), mesh["fsdp"], [Shard(0)])
    assert tensor.to_local().shape[0] == (2 if rank >= 2 else 3)
    assert tensor.full_tensor().tolist() == [0, 1, 2, 3, 4]


def test_reductions(npu_ranks: RankPool) -> None:
    npu_ranks.run(_reductions)


def test_gathers(npu_ranks: RankPool) -> None:
    npu_ranks.run(_gathers)


def test_meshes_and_sharded_tensors(npu_ranks: RankPool) -> None:
    npu_ranks.run(_meshes)
