"""R45, hybrid sharding: micro-batches between the reduce-scatter of shards and the all-reduce of replicas.

Sources: pytorch/pytorch PR#125484 and #148257, NVIDIA/Megatron-LM PR#5743.
Who all-reduces the last micro-batch only, and of it only its own shard, loses the earlier ones: the gradient would be
the last one's share, [0.375, 0.125, 0, 0], on one replica or on both, or twice as large where the two divisors do not
multiply to the number of ranks. Here every backward does both sums and one division; none is put off to the last, so
the count is two of each for two micro-batches, and replicas are equal bit for bit.
"""
from __future__ import annotations

import torch

from ep_fx.testing import RankPools, assert_same_sequence
from tests.cases.hand import M8H, Routing, assert_shares, hand_run
from tests.models.hand_moe import hand_gradient

FIRST: list[Routing] = [[0, 1, 2, 3]] * 8
SECOND: list[Routing] = [[0, 0, 0, 1]] * 8


def _other_replica(rank: int) -> int:
    return (rank + 4) % 8


def test_r45_every_micro_batch_is_summed_over_shards_and_then_over_replicas(ranks: RankPools) -> None:
    runs = ranks(8).run(hand_run, M8H, [FIRST, SECOND])
    assert_shares(runs, hand_gradient([0.5, 0.25, 0.125, 0.125]))
    assert_same_sequence([run.events for run in runs])
    for rank, run in enumerate(runs):
        experts = [e for e in run.events if e.inside in ("ep_fx::reduce_grad", "ep_fx::all_reduce_grad")
                   and any(len(shape) == 3 for shape in e.shapes)]
        shards = tuple(sorted((rank, rank ^ 2)))
        replicas = tuple(sorted((rank, _other_replica(rank))))
        assert [(e.inside, e.ranks, e.numel) for e in experts] == [
            ("ep_fx::reduce_grad", shards, 2 * 64), ("ep_fx::all_reduce_grad", replicas, 64),
        ] * 2
        assert torch.equal(run.gradient, runs[_other_replica(rank)].gradient)
