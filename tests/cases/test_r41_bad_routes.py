"""R41, router logits that are NaN or infinite, and expert ids that do not exist.

Sources: vllm-project/vllm PR#39391, sgl-project/sglang PR#30079, NovaSky-AI/SkyRL PR#1370.
Choices out of range run past a buffer, on another rank. A NaN row keeps its token count and stays NaN in its own
output, so that the loss and every rank's verdict are non-finite; ids that are no expert's raise on the rank that has
them, before it sends anything. The number of experts itself is an id, as in transformers: it means "no expert".
"""
from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import CollectiveLog, RankError, RankPools, local_mesh
from tests.cases.custom import Routed
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE, hand_loss, tokens_for
from tests.oracle import oracle

FACTORS = [1.0, 2.0, 3.0, 4.0]


def top_two() -> HandMoE:
    """Every token has two experts."""
    return HandMoE(top_k=2)


def tokens(rank: int, value: float) -> Tensor:
    """A token for each expert; the third of rank 1 is all `value`."""
    x = tokens_for([0, 1, 2, 3])
    if rank == 1:
        x[2] = value
    return x


def non_finite(rank: int, value: float) -> tuple[Tensor, float, dict[str, Tensor], int]:
    """Output, loss, whole gradients, and the rows that this rank sent in forward."""
    module = ep_fx.transform(top_two(), local_mesh(**M4))
    with CollectiveLog() as log:
        y = module(tokens(rank, value))
    loss = hand_loss(y)
    loss.backward()
    gradients = {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[union-attr]
    rows = [e.shapes[0][0] for e in log.events if "all_to_all" in e.op and e.shapes[0][1:] == (8,)]
    return y.detach(), loss.item(), gradients, rows[0]


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_r41_a_non_finite_row_stays_in_its_token_and_every_rank_agrees(ranks: RankPools, value: float) -> None:
    want = oracle(top_two, [(tokens(rank, value),) for rank in range(4)], hand_loss)
    runs = ranks(4).run(non_finite, value)
    assert [sent for *_, sent in runs] == [4 * 2] * 4
    for rank, (y, loss, gradients, _) in enumerate(runs):
        torch.testing.assert_close(y, want.outputs[rank], equal_nan=True)
        assert (loss == loss) is (rank != 1)
        for name, gradient in gradients.items():
            assert not gradient.isfinite().all(), name
            torch.testing.assert_close(gradient, want.gradients[name], equal_nan=True)


def chosen(rank: int, bad: int) -> Tensor:
    """Rank 1 has the id `bad`; what it sent when that is refused is added to the error."""
    module = ep_fx.transform(Routed(FACTORS), local_mesh(**M4))
    ids = torch.tensor([[bad if rank == 1 else 0, 1], [2, 3]])
    with CollectiveLog() as log:
        try:
            y: Tensor = module(torch.ones(2, 8), ids, torch.ones(2, 2))
        except ValueError as error:
            sent = [event.op for event in log.events if "all_to_all" in event.op]
            raise ValueError(f"{error}; sent: {sent}") from error
    return y.detach()[:, 0]


@pytest.mark.parametrize("bad", [-1, pytest.param(5, marks=pytest.mark.slow)])
def test_r41_an_id_that_is_no_experts_raises_before_anything_is_sent(ranks: RankPools, bad: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        ranks(4).run(chosen, bad)
    assert time.monotonic() - start < 30
    assert error.value.rank == 1
    assert isinstance(error.value.__cause__, ValueError)
    assert "raised by %permute = ep_fx::permute, forward, module 'experts' (" in error.value.report
    for part in ("topk_ids must lie in 0..4", str(bad), "sent: []"):
        assert part in str(error.value.__cause__)


def test_r41_the_number_of_experts_means_no_expert(ranks: RankPools) -> None:
    for rank, y in enumerate(ranks(4).run(chosen, len(FACTORS))):
        assert y.tolist() == [2.0 if rank == 1 else 3.0, 7.0]
