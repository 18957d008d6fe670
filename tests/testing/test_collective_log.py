"""CollectiveLog: what ran, in order, on every way to a collective; bytes of parameters; ranks compared."""
from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import ep_fx.ops  # noqa: F401  defines torch.ops.ep_fx
from ep_fx.testing import CollectiveLog, Event, RankPools, assert_same_sequence, local_mesh

FULL_BYTES = 4 * 4 * 3 * 4  # four shards of [4, 3] fp32


def every_road(rank: int) -> list[Event]:
    group = local_mesh(fsdp=2, ep=2).get_group("ep")
    x = torch.ones(4, 2, requires_grad=True)
    with CollectiveLog() as log:
        dist.all_reduce(torch.ones(3, dtype=torch.bfloat16), group=group)
        gather = torch.ops._c10d_functional.all_gather_into_tensor(x.detach(), 2, group.group_name)
        torch.ops._c10d_functional.wait_tensor(gather)
        funcol.all_to_all_single_autograd(x, [2, 2], [2, 2], group).sum().backward()
    dist.all_reduce(torch.ones(1))
    return log.events


def gather_and_free(rank: int) -> tuple[list[Event], int, int]:
    shard, group = torch.full((4, 3), float(rank)), dist.group.WORLD
    assert group is not None
    ops = torch.ops.ep_fx
    with CollectiveLog(dialect=True) as log:
        first = ops.unshard_wait(ops.unshard([shard], 4, group.group_name))[0]
        assert torch.equal(first[8:12], torch.full((4, 3), 2.0))
        second = ops.unshard_wait(ops.unshard([shard], 4, group.group_name))[0]
        ops.reshard([first])
        kept = log.live_bytes
        del second
        _settle(log, 0)
    return log.events, kept, log.live_bytes


def _settle(log: CollectiveLog, expected: int) -> None:
    """Waits until only `expected` bytes live: a worker of gloo drops its hold of a result a moment after the wait."""
    deadline = time.monotonic() + 5
    while log.live_bytes != expected and time.monotonic() < deadline:
        time.sleep(0.01)


def peak_of(rank: int, reshard_first: bool) -> int:
    shard, group = torch.ones(4, 3), dist.group.WORLD
    assert group is not None
    with CollectiveLog() as log:
        first = torch.ops.ep_fx.unshard_wait(torch.ops.ep_fx.unshard([shard], 4, group.group_name))
        if reshard_first:
            torch.ops.ep_fx.reshard(first)
        torch.ops.ep_fx.unshard_wait(torch.ops.ep_fx.unshard([shard], 4, group.group_name))
    return log.peak_bytes


def uneven(rank: int) -> list[tuple[str, int]]:
    group = dist.group.WORLD
    assert group is not None
    with CollectiveLog(dialect=True) as log:
        gathered = torch.ops.ep_fx.unshard_wait(torch.ops.ep_fx.unshard([torch.ones(2, 3)], 4, group.group_name))[0]
        full = torch.ops.ep_fx.assemble(gathered, 0, [2, 2, 1, 0])
        del gathered
        _settle(log, full.nbytes)
        torch.ops.ep_fx.reshard([full])
    return [(event.op, event.live_bytes) for event in log.events]


def test_collectives_of_torch_and_of_its_functional_form_are_seen_forward_and_backward(ranks: RankPools) -> None:
    logs = ranks(4).run(every_road)
    assert [(e.op, e.ranks, e.numel, e.dtype) for e in logs[3]] == [
        ("c10d::allreduce_", (2, 3), 3, torch.bfloat16),
        ("_c10d_functional::all_gather_into_tensor", (2, 3), 8, torch.float32),
        ("_c10d_functional::all_to_all_single", (2, 3), 8, torch.float32),
        ("_c10d_functional::all_to_all_single", (2, 3), 8, torch.float32),
    ]
    assert_same_sequence(logs)


def test_the_collective_inside_a_dialect_op_and_the_storage_after_reshard_are_seen(ranks: RankPools) -> None:
    events, kept, left = ranks(4).run(gather_and_free)[0]
    gather = ["ep_fx::unshard", "_c10d_functional::all_gather_into_tensor_coalesced", "ep_fx::unshard_wait"]
    assert [e.op for e in events] == [*gather, *gather, "ep_fx::reshard"]
    assert events[1].inside == "ep_fx::unshard"
    assert events[0].ranks == (0, 1, 2, 3)
    assert [e.live_bytes // FULL_BYTES for e in events if not e.is_collective] == [1, 1, 2, 2, 1]
    assert events[-1].storage_bytes == (0,)
    assert (kept, left) == (FULL_BYTES, 0)


@pytest.mark.parametrize(("reshard_first", "units"), [(True, 1), (False, 2)])
def test_peak_counts_units_that_are_whole_at_once(ranks: RankPools, reshard_first: bool, units: int) -> None:
    assert ranks(4).run(peak_of, reshard_first) == [units * FULL_BYTES] * 4


def test_an_assembled_parameter_counts_beside_its_gathered_blocks_while_these_live(ranks: RankPools) -> None:
    blocks, whole = 4 * 2 * 3 * 4, 5 * 3 * 4
    assert ranks(4).run(uneven)[0] == [
        ("ep_fx::unshard", blocks),
        ("_c10d_functional::all_gather_into_tensor_coalesced", 0),
        ("ep_fx::unshard_wait", blocks),
        ("ep_fx::assemble", blocks + whole),
        ("ep_fx::reshard", 0),
    ]


REDUCE = Event("c10d::allreduce_", "1", (0, 1), ((4,),), torch.float32)
EXCHANGE = Event("_c10d_functional::all_to_all_single", "2", (0, 1), ((4, 8),), torch.float32)


@pytest.mark.parametrize(
    "other",
    [
        [EXCHANGE],
        [EXCHANGE, REDUCE],
        [REDUCE, EXCHANGE, REDUCE],
        [replace(REDUCE, dtype=torch.bfloat16), EXCHANGE],
        [replace(REDUCE, shapes=((5,),)), EXCHANGE],
        [replace(REDUCE, group="3"), EXCHANGE],
    ],
    ids=["missing", "order", "extra", "dtype", "size", "group"],
)
def test_ranks_that_differ_are_named(other: list[Event]) -> None:
    with pytest.raises(AssertionError, match="ranks 0 and 1 differ at collective"):
        assert_same_sequence([[REDUCE, EXCHANGE], other])


def test_sizes_of_exchanges_and_groups_of_others_may_differ() -> None:
    apart: dict[str, Any] = {"ranks": (1, 2), "group": "4"}
    assert_same_sequence(
        [[REDUCE, EXCHANGE], [REDUCE, replace(REDUCE, **apart), replace(EXCHANGE, shapes=((9, 8),))], [
            replace(REDUCE, **apart)
        ]]
    )
