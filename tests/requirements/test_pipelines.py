"""SS-01 through torch's own pipeline schedules, on ("pp", "fsdp", "ep") = (2, 1, 2): each micro-batch as if alone."""
from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ep_fx.testing import RankError, RankPools
from tests.oracle import Oracle, assert_all_gradients_close, oracle, relative_error
from tests.requirements.pipeline_runs import (
    MICROBATCHES,
    ROWS,
    PipelineRun,
    batch_of,
    loss_of,
    make_mixtral,
    make_model,
    pipeline,
    refusal,
)

DATA_RANKS = range(2)
EACH = [(part,) for data_rank in DATA_RANKS for part in batch_of(data_rank).split(ROWS)]


def _check(runs: list[PipelineRun], want: Oracle) -> None:
    """Ranks 0 and 1 hold the first stages, 2 and 3 the last; the data rank is the place along ``ep``."""
    for rank, run in enumerate(runs):
        peer = runs[(rank + 2) % 4]
        assert run.gradients.keys() | peer.gradients.keys() == want.gradients.keys()
        assert_all_gradients_close(run.gradients, {n: want.gradients[n] for n in run.gradients})
    for data_rank in DATA_RANKS:
        run, part = runs[2 + data_rank], slice(data_rank * MICROBATCHES, (data_rank + 1) * MICROBATCHES)
        outputs = torch.cat(want.outputs[part])
        assert run.output is not None
        assert relative_error(run.output, outputs) <= 1e-5
        if run.evaluated is not None:
            assert relative_error(run.evaluated, outputs) <= 1e-5
        assert len(run.losses) == MICROBATCHES
        for loss, solo in zip(run.losses, want.losses[part], strict=True):
            assert relative_error(loss, solo) <= 1e-5


@pytest.mark.parametrize(
    ("schedule", "blocks", "steps"),
    [
        ("GPipe", 2, 1),
        ("1F1B", 2, 2),
        ("Interleaved1F1B", 4, 1),
        pytest.param("LoopedBFS", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_ss_01_outputs_losses_and_gradients_of_a_stock_schedule(
    ranks: RankPools, schedule: str, blocks: int, steps: int
) -> None:
    evaluate = schedule == "1F1B"
    runs = ranks(4).run(pipeline, schedule, "tiny", steps, evaluate)
    assert [run.evaluated is not None for run in runs] == [False, False, evaluate, evaluate]
    _check(runs, oracle(partial(make_model, blocks), EACH, loss_of, EACH))


def _mixtral_logits() -> nn.Module:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = make_mixtral()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.whole(input_ids=ids, use_cache=False).logits

    return Logits()


@pytest.mark.slow
def test_ss_01_a_transformers_model_cut_in_two(ranks: RankPools) -> None:
    want = oracle(_mixtral_logits, EACH, loss_of, EACH)
    want = Oracle(want.outputs, want.losses, {n.removeprefix("whole."): g for n, g in want.gradients.items()})
    _check(ranks(4).run(pipeline, "1F1B", "mixtral"), want)


SPLIT_BACKWARD = "once for the inputs and once more for the weights and are not supported; accepted: GPipe, 1F1B, "


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_ss_01_a_schedule_that_splits_backward_is_refused(ranks: RankPools, schedule: str) -> None:
    """The second call of backward is where it can be told; a first stage, which gets one, cannot see it."""
    message = ranks(1).run(refusal, schedule)[0]
    assert schedule in message
    assert SPLIT_BACKWARD in message


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_ss_01_a_schedule_that_splits_backward_is_refused_on_four_ranks(ranks: RankPools, schedule: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(4).run(pipeline, schedule)
    assert SPLIT_BACKWARD in error.value.report
