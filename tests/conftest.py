"""Fixtures of the whole suite: local ranks, and golden files."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

from ep_fx.testing.ranks import RankPools, warm_up

GOLDEN = Path(__file__).parent / "golden"


class Golden(Protocol):
    """Compares a text with the golden file of that name."""

    def __call__(self, name: str, text: str) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


def pytest_configure() -> None:
    """One thread here as on the ranks: tiny products gain nothing from more, and spinning threads starve the ranks."""
    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The fork server imports torch and transformers while the tests that need no rank run."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        warm_up()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """``ranks(4).run(fn, *args)``: `fn(rank, *args)` on 4 gloo ranks that live as long as the session."""
    with RankPools() as pools:
        yield pools


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """``golden("name.txt", text)``: `text` equals the file; with ``--update-golden`` it is written instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {name}: make it with `make golden`"
        assert text == path.read_text(), f"{name} differs; if that is wished: make golden, and read the diff"

    return check
