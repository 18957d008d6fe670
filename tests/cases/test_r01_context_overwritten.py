"""R01, dispatch state on the module, overwritten by the next micro-batch before combine reads it.

Sources: mindspore-ai/hyper-parallel#746; the same fault in torchtitan PR#1013 and VeOmni PR#896.
Splits and permutation live on an instance; a schedule that starts micro-batch N+1 early gives N the wrong ones. Where
only the permutation differs nothing crashes and even the experts' gradients stay right, so outputs are compared token
by token, and the graph is read: combine's context is an edge from its own dispatch.
"""
from __future__ import annotations

from typing import Any

import torch

import ep_fx
from ep_fx.graph import Phase, Role, find_regions, info_of, is_mutation, role_of
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4, assert_shares, hand_run
from tests.interleave import interleaved_forwards
from tests.models.hand_moe import HandMoE, hand_gradient, tokens_for

MICROBATCHES = [[[0, 1, 2, 3]] * 4, [[1, 0, 3, 2]] * 4]


def interleaved(rank: int) -> tuple[list[list[float]], list[str]]:
    module = ep_fx.transform(HandMoE(), local_mesh(**M4))
    batches = [(tokens_for(routings[rank]),) for routings in MICROBATCHES]
    outputs, order = interleaved_forwards(module, batches)
    return [y.sum(-1).tolist() for y in outputs], order


def graph_of(rank: int) -> dict[str, Any]:
    module = ep_fx.transform(HandMoE(), local_mesh(**M4), example_inputs=(tokens_for([0, 1, 2, 3]),))
    graph = module.graph
    (region,) = find_regions(graph)
    ungroup, regroup = (
        [n for n in region.members[Phase.FORWARD] if n.target is op]
        for op in (torch.ops.ep_fx.ungroup.default, torch.ops.ep_fx.regroup.default)
    )
    return {
        "same indices": [n.args[1] is regroup[0].args[1] for n in ungroup],
        "from the context": [n.args[1].args[0] is region.source for n in ungroup],
        "attributes": [n.name for n in graph if n.op == "get_attr"],
        "writes": [n.name for n in graph if is_mutation(n) and role_of(n) is not Role.RESHARD],
        "phases": sorted({info_of(n).phase.name for members in region.members.values() for n in members}),
    }


def test_r01_two_forwards_before_two_backwards(ranks: RankPools) -> None:
    runs = ranks(4).run(hand_run, M4, MICROBATCHES)
    assert all(run.sums == [[1, 2, 3, 4], [2, 1, 4, 3]] for run in runs)
    assert_shares(runs, hand_gradient([0.25] * 4))


def test_r01_both_dispatches_before_both_combines(ranks: RankPools) -> None:
    for sums, order in ranks(4).run(interleaved):
        assert order == ["dispatch 0", "dispatch 1", "combine 0", "combine 1"]
        assert sums == [[1, 2, 3, 4], [2, 1, 4, 3]]


def test_r01_combine_takes_its_context_from_its_own_dispatch_and_no_attribute_is_touched(ranks: RankPools) -> None:
    facts = ranks(4).run(graph_of)[0]
    assert facts == {
        "same indices": [True], "from the context": [True], "attributes": [], "writes": [],
        "phases": ["BACKWARD", "FORWARD"],
    }
