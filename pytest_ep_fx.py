"""The pytest plugin of ep_fx: fixtures `ep_ranks`, `ep_fake_mesh`, `graph_golden`, and the mark `ep_ranks`.

Installed with the package (entry point ``pytest11``) and loaded by every pytest of that environment, so this module
stands outside of the package and imports neither ep_fx nor torch before a test asks for them. docs/testing.md is the
manual.
"""
from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ep_fx.testing import RankPools
    from ep_fx.testing.fake import FakeMeshes
    from ep_fx.testing.golden import Golden
    from ep_fx.testing.on_ranks import EpRanks

_MARK = "ep_ranks"
_FIXTURES = frozenset({"ep_ranks", "ep_rank_pools"})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ep_fx", "graphs and local ranks (ep_fx)")
    group.addoption("--update-golden", action="store_true", help="write golden files of graphs instead of comparing")
    parser.addini("ep_ranks_timeout", "seconds for one call on local ranks (default: 50)", default="50")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARK}(n, timeout=None, **mesh): the test's own body runs on n local ranks, or on those of a mesh such as "
        "fsdp=2, ep=2; ask for the fixtures ep_rank and ep_mesh there",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Events of torch's tracer have no text: in the captured log of a failure they are blank lines."""
    capture: Any = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in () if capture is None else (capture.caplog_handler, capture.report_handler):
        handler.addFilter(_is_no_event)


def _is_no_event(record: logging.LogRecord) -> bool:
    return record.name != "torch.__trace"


def pytest_itemcollected(item: pytest.Item) -> None:
    """A marked test has the session's ranks, whatever its arguments."""
    if item.get_closest_marker(_MARK) is not None and isinstance(item, pytest.Function):
        item.fixturenames.append("ep_rank_pools")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The fork server imports torch while the tests that need no rank run."""
    if session.config.option.collectonly or _distributes(session.config):
        return
    if any(_FIXTURES.intersection(getattr(item, "fixturenames", ())) for item in session.items):
        from ep_fx.testing import warm_up

        warm_up()


def _distributes(config: pytest.Config) -> bool:
    """Whether this process hands its tests to workers of pytest-xdist."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a marked test on ranks."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    from ep_fx.testing.on_ranks import run_marked

    pools: Any = pyfuncitem.funcargs["ep_rank_pools"]
    run_marked(pyfuncitem, mark, pools, _timeout(pyfuncitem.config))
    return True


@pytest.fixture(scope="session")
def ep_rank_pools() -> Iterator[RankPools]:
    """``ep_rank_pools(4).run(fn, *args)``: ranks that live as long as the session; `ep_ranks` runs on them."""
    from ep_fx.testing import RankPools

    with RankPools() as pools:
        yield pools


@pytest.fixture
def ep_ranks(ep_rank_pools: RankPools, pytestconfig: pytest.Config) -> EpRanks:
    """``ep_ranks(4, body, *args)``: ``body(rank, *args)`` on 4 local gloo ranks; results by rank."""
    from ep_fx.testing.on_ranks import EpRanks

    return EpRanks(ep_rank_pools, _timeout(pytestconfig))


@pytest.fixture
def ep_rank(request: pytest.FixtureRequest) -> Any:
    """In a test marked ``ep_ranks``: the number of the rank that runs the body."""
    from ep_fx.testing.on_ranks import rank_of

    return rank_of(request.node.get_closest_marker(_MARK))


@pytest.fixture
def ep_mesh(request: pytest.FixtureRequest) -> Any:
    """In a test marked ``ep_ranks`` with mesh dimensions: the mesh, a `DeviceMesh` on every rank."""
    from ep_fx.testing.on_ranks import mesh_of

    return mesh_of(request.node.get_closest_marker(_MARK))


@pytest.fixture
def ep_fake_mesh() -> Iterator[FakeMeshes]:
    """``ep_fake_mesh(fsdp=64, ep=16)``: a mesh of any size in this process, for graphs that are only read."""
    from ep_fx.testing.fake import FakeMeshes

    meshes = FakeMeshes()
    try:
        yield meshes
    finally:
        meshes.close()


@pytest.fixture
def graph_golden(request: pytest.FixtureRequest) -> Golden:
    """``graph_golden(graph, "name")``: the graph is as in the file ``golden/name.txt`` beside the test."""
    from ep_fx.testing.golden import Golden

    folder = Path(str(request.node.path)).parent / "golden"
    return Golden(folder, update=request.config.getoption("--update-golden"))


def _timeout(config: pytest.Config) -> float:
    text = str(config.getini("ep_ranks_timeout"))
    try:
        return float(text)
    except ValueError:
        raise pytest.UsageError(f"ep_ranks_timeout is a number of seconds, got {text!r}") from None
