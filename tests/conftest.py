"""What the whole suite has beside the fixtures of the plugin `pytest_ep_fx`, which a user has too."""
from __future__ import annotations

import pytest
import torch

from ep_fx.testing import RankPools

# Loaded here where the package is on the path but not installed; where it is installed, its entry point has this very
# name, and pytest loads a plugin once for a name.
pytest_plugins = ["pytest_ep_fx", "pytester"]
collect_ignore = ["downstream"]  # a project of its own, run by testing/test_downstream.py


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-models", action="store_true", help="enter what the matrix of models measures in docs/")


def pytest_configure() -> None:
    """One thread here as on the ranks: tiny products gain nothing from more, and spinning threads starve the ranks."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks(ep_rank_pools: RankPools) -> RankPools:
    """``ranks(4).run(fn, *args)``: `fn(rank, *args)` on 4 gloo ranks that live as long as the session."""
    return ep_rank_pools
