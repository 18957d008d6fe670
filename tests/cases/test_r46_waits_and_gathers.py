"""R46, a collective's wait, or the gather of backward, goes missing.

Sources: pytorch/torchtitan#1547, pytorch/pytorch PR#174829 for #173709.
No second gather although parameters were freed after forward; waits absent; or a loss on a tensor that forward left
on the module reads memory that is gone. The graph must have one wait for each collective, before its uses, and the
recorded run as many gathers; the stored tensor is refused by name.
"""
from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

import ep_fx
from ep_fx.graph import Phase, Role, role_of
from ep_fx.graph.roles import WAIT_OF
from ep_fx.testing import CollectiveLog, RankPools, local_mesh
from tests.cases.gathers import gathered
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE, tokens_for
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids


def structure(rank: int) -> dict[str, Any]:
    module = ep_fx.transform(TinyMoE(shared=True, grouped=True), local_mesh(**M4))
    ids = token_ids(rank)
    with CollectiveLog(dialect=True) as log:
        next_token_loss(module(ids), ids).backward()
    graph = module.graph
    unwaited = [
        node.name for node in graph
        if (wait := WAIT_OF.get(role_of(node))) and [role_of(user) for user in node.users] != [wait]
    ]
    forward, backward = (gathered(graph, phase) for phase in Phase)
    return {
        "unwaited": unwaited,
        "forward": forward == Counter(p.placeholder for p in graph.manifest.parameters if p.layout.gather_dims),
        "backward": max(backward.values()),
        "experts in backward": sum("experts" in name for name in backward),
        "in the run": [len(log.of("unshard")), len(log.of("reshard"))],
        "in the graph": [len(graph.nodes(Role.UNSHARD)), len(graph.nodes(Role.RESHARD))],
        "left": log.live_bytes,
    }


class Remembering(HandMoE):
    """Leaves its balance loss on itself, as older MoE code does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.balance = y.square().mean()
        return y


def on_the_module(rank: int) -> str:
    module = ep_fx.transform(Remembering(), local_mesh(**M4))
    with pytest.raises(ValueError, match="stores a tensor on the module") as caught:
        module(tokens_for([0, 1, 2, 3]))
    return str(caught.value)


def test_r46_every_collective_is_waited_for_once_and_every_parameter_gathered_once_in_each_direction(
    ranks: RankPools,
) -> None:
    for facts in ranks(4).run(structure):
        assert facts["unwaited"] == []
        assert facts["forward"]
        assert facts["backward"] == 1
        assert facts["experts in backward"] == 6
        assert facts["in the run"] == facts["in the graph"]
        assert facts["left"] == 0


def test_r46_a_loss_left_on_the_module_is_refused_by_name(ranks: RankPools) -> None:
    assert all("Remembering.balance" in message for message in ranks(4).run(on_the_module))
