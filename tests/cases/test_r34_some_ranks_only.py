"""R34, evaluation on some ranks only.

Sources: microsoft/Tutel#182, NVIDIA/Model-Optimizer PR#1966, yiqiao-yin/deepspeed-course PR#28.
Rank 0 evaluates alone, or batch counts differ: an exchange waits for ranks that do not come, and the job dies minutes
after training succeeded. Ranks that run out of data pass an empty batch; a rank that is alone fails when its process
group gives up, and the error names the node and the line of the model that it waited in.
"""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankError, RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE, tokens_for


def evaluations(rank: int, more: str) -> tuple[bool, list[int], int]:
    """Three batches on every rank, without gradients.

    Args:
        more: what comes then: "empty", ranks 1 to 3 are out of data; "alone", rank 0 has one more.

    Returns:
        Whether all outputs equal eager's, the shape of the last, and how many outputs are still alive when nobody
        holds them.
    """
    module, eager = ep_fx.transform(HandMoE(), local_mesh(**M4)).eval(), HandMoE()
    right, alive = True, list[weakref.ref[Tensor]]()
    y = torch.empty(0)
    with torch.no_grad():
        for batch in range(3):
            x = tokens_for([(rank + batch) % 4, batch])
            y = module(x)
            right &= torch.equal(y, eager(x))
            alive.append(weakref.ref(y))
        if more == "empty":
            y = module(tokens_for([1, 2] if rank == 0 else []))
        elif more == "alone" and rank == 0:
            module(tokens_for([0, 1, 2, 3]))
    gc.collect()
    shape = list(y.shape)
    del y
    return right, shape, sum(ref() is not None for ref in alive)


@pytest.mark.parametrize("more", ["nothing", "empty"])
def test_r34_ranks_that_take_part_are_right_with_or_without_data(ranks: RankPools, more: str) -> None:
    for rank, (right, shape, alive) in enumerate(ranks(4).run(evaluations, more)):
        assert right
        assert shape == [0 if more == "empty" and rank else 2, 8]
        assert alive <= (more == "nothing")  # the last output, until it is deleted


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_r34_a_rank_alone_fails_in_time_and_says_where_it_waited(ranks: RankPools) -> None:
    with pytest.raises(RankError) as error:
        ranks(4).run(evaluations, "alone", timeout=60)
    assert error.value.rank == 0
    assert "raised by %unshard_wait" in error.value.report
    assert "module 'root' (" in error.value.report
    assert "moe.py:" in error.value.report
