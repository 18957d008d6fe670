"""R01, dispatch state on the module, overwritten by the next micro-batch before combine reads it.

Sources: mindspore-ai/hyper-parallel#746; the same fault in torchtitan PR#1013 and VeOmni PR#896.
Splits and permutation live on an instance; a schedule that starts micro-batch N+1 early gives N the wrong ones. Where
only the permutation differs nothing crashes and even the experts' gradients stay right, so outputs are compared token
by token, and the graph is read: combine's context is an edge from its own dispatch. Rows travel in expert order here,
so the recipe's routing leaves two equal contexts; in the second one the splits are equal and the regrouping differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ep_fx
from ep_fx.graph import Phase, Role, find_regions, info_of, is_mutation, role_of
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4, Routing, assert_shares, hand_run
from tests.interleave import interleaved_forwards
from tests.models.hand_moe import HandMoE, hand_gradient, tokens_for

RECIPE: list[list[Routing]] = [[[0, 1, 2, 3]] * 4, [[1, 0, 3, 2]] * 4]
REGROUPED: list[list[Routing]] = [[[0, 0, 1, 2]] * 4, [[0, 1, 1, 2]] * 4]
BOTH = pytest.mark.parametrize(
    ("microbatches", "shares"),
    [(RECIPE, [0.25] * 4), (REGROUPED, [0.375, 0.375, 0.25, 0])],
    ids=["another order", "equal splits, regrouped"],
)


def interleaved(rank: int, microbatches: list[list[Routing]]) -> tuple[list[list[float]], list[str]]:
    module = ep_fx.transform(HandMoE(), local_mesh(**M4))
    batches = [(tokens_for(routings[rank]),) for routings in microbatches]
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


@BOTH
def test_r01_two_forwards_before_two_backwards(
    ranks: RankPools, microbatches: list[list[Routing]], shares: list[float]
) -> None:
    runs = ranks(4).run(hand_run, M4, microbatches)
    assert all(run.sums == _sums(microbatches) for run in runs)
    assert_shares(runs, hand_gradient(shares))


@BOTH
def test_r01_both_dispatches_before_both_combines(
    ranks: RankPools, microbatches: list[list[Routing]], shares: list[float]
) -> None:
    for sums, order in ranks(4).run(interleaved, microbatches):
        assert order == ["dispatch 0", "dispatch 1", "combine 0", "combine 1"]
        assert sums == _sums(microbatches)


def _sums(microbatches: list[list[Routing]]) -> list[list[float]]:
    """Expert e answers e + 1; the same on every rank."""
    return [[e + 1.0 for e in routings[0]] for routings in microbatches]


def test_r01_combine_takes_its_context_from_its_own_dispatch_and_no_attribute_is_touched(ranks: RankPools) -> None:
    facts = ranks(4).run(graph_of)[0]
    assert facts == {
        "same indices": [True],
        "from the context": [True],
        "attributes": [],
        "writes": [],
        "phases": ["BACKWARD", "FORWARD"],
    }
