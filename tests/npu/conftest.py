"""Ranks on the npu device of `ep_fx.testing.npu`; the test process itself has none."""
from __future__ import annotations

import pytest

from ep_fx.testing.ranks import RankPool, RankPools


@pytest.fixture(scope="session")
def npu_rank(ep_rank_pools: RankPools) -> RankPool:
    """One process with the device."""
    return ep_rank_pools(1, "npu")


@pytest.fixture(scope="session")
def npu_ranks(ep_rank_pools: RankPools) -> RankPool:
    """Four ranks on the device."""
    return ep_rank_pools(4, "npu")
