"""R14: every collective of the emitted module through the real ProcessGroupHCCL, uneven and empty splits among them."""
from __future__ import annotations

import pytest
import torch

from ep_fx.testing import RankPools
from tests.npu_sim.collectives import CASES, RANKS, run

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_collective_gives_exact_rows(ranks: RankPools, case: str, dtype: torch.dtype) -> None:
    ranks(RANKS).run(run, case, dtype)
