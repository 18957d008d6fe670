"""The operators that communicate, on two ranks: gathers and sums of mixed dtypes, a whole exchange."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ep_fx.ops import dispatch_context
from ep_fx.testing import CollectiveLog, RankPools

ops = torch.ops.ep_fx
RANKS = 2


def _group() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def _mixed(seed: int) -> list[Tensor]:
    """A unit's tensors: three dtypes in turns, an empty one, layouts that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 4), (4, 3), (2,), (0, 3), (6, 4), (4, 4)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [
        tensors[0], tensors[1].bfloat16(), tensors[2].double(), tensors[3], tensors[4].t(),
        tensors[5][:1, :1].expand(4, 4),
    ]


def _cut(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(RANKS)[rank] if tensor.shape[0] else tensor


def _gather(rank: int) -> None:
    full = _mixed(0)
    gathered = ops.unshard_wait(ops.unshard([_cut(tensor, rank) for tensor in full], RANKS, _group()))
    for got, expected in zip(gathered, full, strict=True):
        torch.testing.assert_close(got, expected.contiguous(), rtol=0, atol=0)
    ops.reshard([gathered[0]])
    assert torch.equal(gathered[4], full[4])


def _gather_large(rank: int) -> list[str]:
    full = [torch.randn(8), torch.randn(512, 512), torch.randn(4, 2)]
    with CollectiveLog() as log:
        gathered = ops.unshard_wait(ops.unshard([_cut(tensor, rank) for tensor in full], RANKS, _group()))
    assert all(torch.equal(got, expected) for got, expected in zip(gathered, full, strict=True))
    return [event.op.split("::")[1] for event in log.events]


def _reduce(rank: int) -> None:
    mine, before = _mixed(rank), _mixed(rank)
    sums = [one + other for one, other in zip(_mixed(0), _mixed(1), strict=True)]
    scattered = ops.reduce_grad_wait(ops.reduce_grad(mine, RANKS, _group()))
    for got, total in zip(scattered, sums, strict=True):
        torch.testing.assert_close(got, _cut(total, rank))
    for got, total in zip(ops.reduce_grad_wait(ops.all_reduce_grad(mine, _group())), sums, strict=True):
        torch.testing.assert_close(got, total)
    assert all(torch.equal(now, old) for now, old in zip(mine, before, strict=True))


def _exchange(rank: int) -> None:
    group, collectives = _group(), torch.ops._c10d_functional
    counts, x = torch.tensor([[3, 2, 1, 4], [5, 0, 0, 3]])[rank], torch.randn(12, 3)

    def send(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        result: Tensor = collectives.wait_tensor(collectives.all_to_all_single(rows, received, sent, group))
        return result

    context = dispatch_context(counts, send(counts, [2, 2], [2, 2]), 12, RANKS, "experts")
    inputs, outputs = list(context.input_splits), list(context.output_splits)
    routed = ops.regroup(send(ops.send_rows(x, inputs), outputs, inputs), context.permuted_indices)
    assert routed.shape[0] == int(context.tokens_per_expert.sum())
    back = ops.pad_rows(send(ops.ungroup(routed, context.permuted_indices), inputs, outputs), context.input_shape)
    sent = int(counts.sum())
    assert torch.equal(back[:sent], x[:sent])
    assert not back[sent:].any()


def test_gather_of_mixed_dtypes_is_exact(ranks: RankPools) -> None:
    """gloo's own coalesced gather of fp32 and fp64 tensors returns scrambled numbers and no error."""
    ranks(RANKS).run(_gather)


def test_a_large_shard_on_the_cpu_goes_in_a_call_of_its_own(ranks: RankPools) -> None:
    """gloo packs what it gathers together: for large shards the copies cost more than a message."""
    calls = ["all_gather_into_tensor", "all_gather_into_tensor_coalesced"]
    assert ranks(RANKS).run(_gather_large) == [calls] * RANKS


def test_sums_of_mixed_dtypes_leave_their_arguments_alone(ranks: RankPools) -> None:
    ranks(RANKS).run(_reduce)


def test_reg_2_combine_inverts_dispatch_between_ranks(ranks: RankPools) -> None:
    """REG-2: combine inverts dispatch for an identity expert; rows that no expert takes come back as 0."""
    ranks(RANKS).run(_exchange)
