"""FSDP + EP: FE-01 to FE-03, HO-01, HO-02 and GR-01, on 4 ranks as FSDP 2 x EP 2."""
from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ep_fx.testing import Event, RankPools, assert_same_sequence
from tests.models.tiny_moe import next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, oracle, relative_error
from tests.requirements.fsdp_ep_runs import (
    LEARNING_RATE,
    STEPS,
    Pass,
    Recorded,
    Step,
    make_model,
    recorded,
    training,
    without_fsdp,
)

RANKS = range(4)
DISTINCT = [(token_ids(rank),) for rank in RANKS]
SAME = [(token_ids(0),) for _ in RANKS]
EXPERT_SHARDS = ((1, 32, 16), (1, 16, 32), (1, 32, 16))
EXPERTS = ((2, 32, 16), (2, 16, 32), (2, 32, 16))


class Training(NamedTuple):
    """`training` of all ranks."""

    distinct: list[Pass]
    same: list[Pass]
    steps: list[list[Step]]


@pytest.fixture(scope="module")
def trained(ranks: RankPools) -> Training:
    return Training(*map(list, zip(*ranks(4).run(training), strict=True)))


@pytest.fixture(scope="module")
def strict(ranks: RankPools) -> list[Recorded]:
    return ranks(4).run(recorded, "strict")


@pytest.fixture(scope="module")
def early(ranks: RankPools) -> list[Recorded]:
    return ranks(4).run(recorded, "early")


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", ["distinct", "same"])
def test_fe_01_output_equals_the_single_device_reference(trained: Training, tokens: str) -> None:
    want = oracle(make_model, DISTINCT if tokens == "distinct" else SAME, next_token_loss, DISTINCT)
    for got, output in zip(getattr(trained, tokens), want.outputs, strict=True):
        assert relative_error(got.logits, output) <= 1e-5


@pytest.mark.parametrize("tokens", ["distinct", "same"])
def test_fe_02_every_gradient_is_there_finite_and_equal_to_the_oracles(trained: Training, tokens: str) -> None:
    batches = DISTINCT if tokens == "distinct" else SAME
    want = oracle(make_model, batches, next_token_loss, batches)
    for got in getattr(trained, tokens):
        assert_all_gradients_close(got.gradients, want.gradients)


def test_fe_02_every_gradient_equals_that_of_ep_without_fsdp(trained: Training, ranks: RankPools) -> None:
    """With ``-s`` prints the absolute errors that were compared."""
    plain, want = ranks(4).run(without_fsdp), oracle(make_model, DISTINCT, next_token_loss, DISTINCT).gradients
    print("\n" + _absolute_errors(trained.distinct, plain, want))
    for got, other in zip(trained.distinct, plain, strict=True):
        assert sum(".experts." in name for name in other.gradients) == 6
        assert_all_gradients_close(got.gradients, {n: g for n, g in other.gradients.items() if g is not None})
        assert_all_gradients_close(other.gradients, want)


def _absolute_errors(both: list[Pass], plain: list[Pass], want: dict[str, Tensor]) -> str:
    """Table of the largest difference of any element on any rank, for each parameter."""

    def worst(name: str, left: list[Pass], right: list[Tensor | None]) -> str:
        pairs = [(run.gradients[name], other) for run, other in zip(left, right, strict=True)]
        return f"{max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None):14.2e}"

    columns = ("FSDP+EP-oracle", "EP-oracle", "FSDP+EP-EP", "largest")
    lines = [f"{'gradient of':32}" + "".join(f"{column:>16}" for column in columns)]
    for name, expected in want.items():
        oracles: list[Tensor | None] = [expected] * len(both)
        numbers = (
            worst(name, both, oracles),
            worst(name, plain, oracles),
            worst(name, both, [run.gradients[name] for run in plain]),
            f"{float(expected.abs().max()):14.2e}",
        )
        lines.append(f"{name:32}" + "".join(f"{number:>16}" for number in numbers))
    return "\n".join(lines)


def test_fe_03_three_steps_lower_the_loss_and_keep_all_parameters_equal_to_the_oracles(trained: Training) -> None:
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
            got = trained.steps[rank][step]
            assert relative_error(got.loss, each[rank]) <= 1e-5
            assert_all_gradients_close(got.parameters, dict(model.named_parameters()))
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == STEPS


# -- order -------------------------------------------------------------------------------------------------------------
def _labels(events: list[Event]) -> list[str]:
    """What happened to the experts and their tokens, in the order in which it ran."""
    names = {
        ("ep_fx::unshard", EXPERT_SHARDS): "unshard", ("ep_fx::unshard_wait", EXPERTS): "unsharded",
        ("ep_fx::reshard", EXPERTS): "reshard",
    }
    plain = {
        "_c10d_functional::all_to_all_single": "exchange", "ep_fx::grouped_mm": "product",
        "ep_fx::grouped_mm_backward": "product backward", "ep_fx::regroup": "arrived", "ep_fx::pad_rows": "returned",
    }
    found = [names.get((e.op, e.shapes)) or plain.get(e.op) for e in events if e.inside is None]
    return [name for name in found if name]


GATHER = ["unshard", "unsharded"]
OUT = ["exchange", "arrived"]
BACK = ["exchange", "returned"]
COUNTS = ["exchange"]
PRODUCTS = {"forward": ["product"] * 3, "backward": ["product backward"] * 3}


def test_ho_01_experts_are_whole_before_dispatch_and_ho_02_freed_after_combine(strict: list[Recorded]) -> None:
    forward = [*GATHER, *COUNTS, *OUT, *PRODUCTS["forward"], *BACK, "reshard"]
    backward = [*GATHER, *OUT, *PRODUCTS["backward"], *BACK, "reshard"]
    for run in strict:
        assert _labels(run.events) == [*forward, *forward, *backward, *backward]


def test_ho_02_early_frees_the_experts_after_their_last_use(early: list[Recorded]) -> None:
    forward = [*GATHER, *COUNTS, *OUT, *PRODUCTS["forward"], "reshard", *BACK]
    backward = [*GATHER, *OUT, *PRODUCTS["backward"], "reshard", *BACK]
    for run in early:
        assert _labels(run.events) == [*forward, *forward, *backward, *backward]


@pytest.mark.parametrize("policy", ["strict", "early"])
def test_ho_02_a_reshard_frees_and_the_bytes_alive_are_those_that_the_graph_says(
    policy: str, request: pytest.FixtureRequest
) -> None:
    runs: list[Recorded] = request.getfixturevalue(policy)
    for run in runs:
        freed = [size for event in run.events if event.op == "ep_fx::reshard" for size in event.storage_bytes]
        assert len(freed) > 10
        assert set(freed) == {0}
        assert run.live == run.predicted
        assert run.peaks[0] == run.peaks[1] > 0
        assert run.live[-1][1] == 0
    assert_same_sequence([run.events for run in runs])


# -- reductions --------------------------------------------------------------------------------------------------------
def test_gr_01_each_gradient_is_summed_once_over_the_ranks_on_which_it_differs(strict: list[Recorded]) -> None:
    for rank, run in enumerate(strict):
        reduced = Counter[tuple[bool, tuple[int, ...]]]()
        for event in run.events:
            assert event.op != "ep_fx::all_reduce_grad"
            if event.op == "ep_fx::reduce_grad":
                reduced.update((shape in EXPERTS, event.ranks) for shape in event.shapes)
        fsdp_peers = (rank % 2, rank % 2 + 2)
        dense = sum(row.kind == "dense" for row in run.reductions)
        assert reduced == {(True, fsdp_peers): 6, (False, (0, 1, 2, 3)): dense}
        assert dense + 6 == sum(1 for _ in make_model().parameters())
        assert {row.divisor for row in run.reductions} == {4.0}
        assert {row.steps for row in run.reductions if row.kind == "expert"} == {("reduce-scatter over fsdp",)}
        assert {row.steps for row in run.reductions if row.kind == "dense"} == {("reduce-scatter over fsdp,ep",)}
