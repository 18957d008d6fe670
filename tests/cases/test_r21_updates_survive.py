"""R21, dead-code removal deletes buffer updates and collectives that look unused.

Sources: pytorch/pytorch#68301, pytorch/torchtitan PR#3529.
An in-place update whose result nobody reads is dropped, so a counter stands still, or a peer waits for a collective
that is gone. Here a counter must rise by the exact count at every step, and the clean-up pass
must not change what is communicated.
"""
from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

import ep_fx
from ep_fx import api
from ep_fx.passes import DeadCode, default_pipeline
from ep_fx.testing import CollectiveLog, Event, RankPools, assert_same_sequence, local_mesh
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE, hand_loss, tokens_for

STEPS = [[0, 1, 2, 3], [0, 0, 0, 1], [3, 3, 2]]


class CountingMoE(HandMoE):
    """HandMoE that counts, in a buffer, the tokens it ever sent to each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        _, ids, _ = self.route(x)
        self.count.add_((ids.view(-1, 1) == torch.arange(4)).sum(0))
        return super().forward(x)


def counted(rank: int, clean_up: bool) -> tuple[list[list[int]], list[tuple[str, str | None]], list[Event]]:
    """The counter after each step, and the collectives."""
    passes = tuple(p for p in default_pipeline() if clean_up or not isinstance(p, DeadCode))
    with mock.patch.object(api, "default_pipeline", return_value=passes):
        module = ep_fx.transform(CountingMoE(), local_mesh(**M4))
        counts = []
        with CollectiveLog() as log:
            for step in STEPS:
                shifted = [(e + rank) % 4 for e in step]
                hand_loss(module(tokens_for(shifted))).backward()
                counts.append(module.count.tolist())
    return counts, [(e.op, e.group) for e in log.events], log.events


def test_r21_a_counter_rises_by_the_exact_count_and_clean_up_changes_no_collective(ranks: RankPools) -> None:
    clean, raw = ranks(4).run(counted, True), ranks(4).run(counted, False)
    for rank, (counts, events, _) in enumerate(clean):
        total = [0] * 4
        for step, seen in zip(STEPS, counts, strict=True):
            for e in step:
                total[(e + rank) % 4] += 1
            assert seen == total
        assert events == raw[rank][1]
        assert counts == raw[rank][0]
    assert_same_sequence([events for _, _, events in clean])
