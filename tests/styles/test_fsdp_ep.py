"""Eager EP with torch's own FSDP2 on 4 ranks, 2 x 2: FE-01 to FE-03, HO-01 to HO-04, both orders."""
from __future__ import annotations

from collections import Counter
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ep_fx.testing import RankPools, assert_same_sequence
from tests.models.tiny_moe import next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, oracle, relative_error
from tests.requirements.fsdp_ep_runs import LEARNING_RATE, STEPS, make_model
from tests.styles.model_runs import ORDERS, UNITS, Pass, Recorded, Step, accumulated, recorded, training, without_fsdp

RANKS = range(4)
DISTINCT = [(token_ids(rank),) for rank in RANKS]
SAME = [(token_ids(0),) for _ in RANKS]
WAYS = list(product(UNITS, ORDERS))


class Training(NamedTuple):
    """`training` of all ranks."""

    distinct: list[Pass]
    same: list[Pass]
    steps: list[list[Step]]


@pytest.fixture(scope="module")
def trained(ranks: RankPools) -> dict[tuple[str, str], Training]:
    runs = {way: ranks(4).run(training, *way) for way in WAYS}
    return {way: Training(*map(list, zip(*run, strict=True))) for way, run in runs.items()}


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("tokens", ["distinct", "same"])
def test_fe_01_output_and_fe_02_every_gradient_equal_the_single_process(
    trained: dict[tuple[str, str], Training], way: tuple[str, str], tokens: str
) -> None:
    batches = DISTINCT if tokens == "distinct" else SAME
    want = oracle(make_model, batches, next_token_loss, batches)
    for rank, got in enumerate(getattr(trained[way], tokens)):
        assert relative_error(got.logits, want.outputs[rank]) <= 1e-5
        assert_all_gradients_close(got.gradients, want.gradients)


def test_fe_02_every_gradient_equals_that_of_ep_without_fsdp(
    trained: dict[tuple[str, str], Training], ranks: RankPools
) -> None:
    want = oracle(make_model, DISTINCT, next_token_loss, DISTINCT).gradients
    plain = ranks(4).run(without_fsdp)[0].gradients
    for unit, order in WAYS:
        got = trained[unit, order].distinct[0].gradients
        print(f"\n{order}, FSDP unit: {unit}\n{'absolute error of the gradient':36}  to EP alone  to oracle")
        for name in want:
            print(f"{name:36}{_absolute(got[name], plain[name]):13.1e}{_absolute(got[name], want[name]):11.1e}")
        assert_all_gradients_close(got, {n: g for n, g in plain.items() if g is not None})
    assert len(plain) == len(want)
    assert_all_gradients_close(plain, want)


def _absolute(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None
    assert want is not None
    return float((got.double() - want.double()).abs().max())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_fe_03_three_steps_lower_the_loss_and_keep_all_parameters_equal_to_the_oracles(
    trained: dict[tuple[str, str], Training], way: tuple[str, str]
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [next_token_loss(model(ids), ids) for (ids,) in DISTINCT]
        torch.stack(each).mean().backward()
        optimizer.step()
        losses.append(torch.stack(each).mean().item())
        for rank in RANKS:
            got = trained[way].steps[rank][step]
            assert relative_error(got.loss, each[rank]) <= 1e-5
            assert_all_gradients_close(got.parameters, dict(model.named_parameters()))
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("unit", UNITS)
def test_ho_04_the_order_of_applying_ep_and_fsdp_changes_no_bit(
    trained: dict[tuple[str, str], Training], unit: str
) -> None:
    first, second = (trained[unit, order] for order in ORDERS)
    for rank in RANKS:
        assert torch.equal(first.distinct[rank].logits, second.distinct[rank].logits)
        last, other = first.steps[rank][-1].parameters, second.steps[rank][-1].parameters
        assert last.keys() == other.keys()
        assert [n for n in last if not torch.equal(last[n], other[n])] == []


@pytest.mark.parametrize("sync", [True, False], ids=["reduced twice", "no_sync"])
@pytest.mark.parametrize("unit", UNITS)
def test_fe_02_micro_batches_accumulate(ranks: RankPools, unit: str, sync: bool) -> None:
    both = [[(token_ids(rank + 10 * index),) for rank in RANKS] for index in range(2)]
    parts = [oracle(make_model, batches, next_token_loss, batches).gradients for batches in both]
    want = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    for got in ranks(4).run(accumulated, unit, sync):
        assert_all_gradients_close(got, want)


# -- order -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(ranks: RankPools) -> dict[tuple[str, str], list[Recorded]]:
    return {way: ranks(4).run(recorded, *way) for way in WAYS}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ho_01_experts_are_whole_before_dispatch_and_ho_02_freed_after_combine(
    runs: dict[tuple[str, str], list[Recorded]], way: tuple[str, str]
) -> None:
    counts, rows, back = ["exchange"], ["exchange"], ["exchange"]
    forward, backward = ["unshard", *counts, *rows, *back, "reshard"], ["unshard", *back, *rows, "reshard"]
    for run in runs[way]:
        assert run.labels == [*forward, *forward, "backward", *backward, *backward]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ho_03_each_gradient_is_reduced_over_the_ranks_on_which_it_differs_once(
    runs: dict[tuple[str, str], list[Recorded]], way: tuple[str, str]
) -> None:
    """The MoE's dense parameters: over fsdp by FSDP and over ep by the style, or over both by FSDP alone."""
    moe_is_unit = way[0] == "moe"
    dense = 4 if moe_is_unit else 0  # router and shared expert of each block
    for rank, run in enumerate(runs[way]):
        ep = tuple(sorted((rank, rank ^ 1)))
        found = Counter((_kind(e.op), e.ranks) for e in run.events if "reduce" in e.op)
        assert found[("all_reduce", ep)] == 2 * dense
        assert found[("reduce_scatter", (rank % 2, rank % 2 + 2))] == 2
        assert found[("reduce_scatter", (0, 1, 2, 3))] == 3
        assert found.total() == 2 * dense + 5
    assert_same_sequence([run.events for run in runs[way]])


def _kind(op: str) -> str:
    return "reduce_scatter" if "reduce_scatter" in op else "all_reduce" if "allreduce" in op else op
