"""Test bodies on local ranks, for the pytest plugin: `ep_ranks(4, body, *args)`, and tests marked ``ep_ranks``.

A marked test runs as usual but for its own body: fixtures are set up here, and their values travel to the ranks; the
values of `ep_rank` and `ep_mesh` are made there.
"""
from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import pytest

from ep_fx.testing.ranks import RankError, RankPools, local_mesh

T = TypeVar("T")
_USAGE = "@pytest.mark.ep_ranks(4), or @pytest.mark.ep_ranks(fsdp=2, ep=2)"
_STAY = frozenset({"capfd", "capfdbinary", "caplog", "capsys", "capsysbinary", "monkeypatch", "recwarn", "request"})
"""Fixtures of pytest that act on the process they are made in."""
_OUTCOME = re.compile(r"(?:_pytest\.outcomes\.)?(Skipped|XFailed)\b(?:: (.*))?")
"""How the text of a rank begins that called `pytest.skip` or `pytest.xfail`; these cannot be pickled."""


@dataclass(frozen=True)
class EpRanks:
    """What the fixture `ep_ranks` is.

    Args:
        pools: the session's ranks.
        timeout: seconds for a call that does not say otherwise.
    """

    pools: RankPools
    timeout: float

    def __call__(self, world_size: int, body: Callable[..., T], *args: Any, timeout: float | None = None) -> list[T]:
        """Calls ``body(rank, *args)`` on `world_size` local gloo ranks and returns the results by rank.

        Args:
            body: a function at the top of a module; every rank imports it by name.
            args: anything that can be pickled.
            timeout: seconds; None: the ini option ``ep_ranks_timeout``.

        Raises:
            RankError: `body` raised on a rank, or a rank died; the message says what became of each rank.
            TimeoutError: a rank did not answer in time; the message says where each rank was.
            TypeError: `body` or an argument cannot be sent to another process.
            ValueError: `world_size` is below 1.

        Where all ranks that did not finish skip or xfail, so does the test.
        """
        __tracebackhide__ = True
        try:
            return self.pools(world_size).run(body, *args, timeout=self.timeout if timeout is None else timeout)
        except RankError as error:
            left = _left(error)
            if left is None:
                raise
        left.leave()
        raise AssertionError(f"a rank called pytest.xfail({left.reason!r}), which --runxfail does not take")


@dataclass(frozen=True)
class _Ranks:
    """What a mark says."""

    world_size: int
    mesh: tuple[tuple[str, int], ...]
    timeout: float | None


class _Left(NamedTuple):
    """How a rank left a body without an error.

    Args:
        kind: what it called.
        reason: what it said.
    """

    kind: Literal["skip", "xfail"]
    reason: str

    def leave(self) -> None:
        """Leaves the test in the same way."""
        if self.kind == "skip":
            pytest.skip(self.reason)
        pytest.xfail(self.reason)


def _left(error: RankError) -> _Left | None:
    """How the ranks left, where none failed in another way."""
    failed = [state for state in error.states if state.state in ("died", "failed")]
    said = [_OUTCOME.match(state.text) if state.state == "failed" else None for state in failed]
    if not said or said[0] is None or not all(said):
        return None
    return _Left("skip" if said[0][1] == "Skipped" else "xfail", said[0][2] or "")


class _Rank:
    """Stands for the number of the rank until the body runs there."""


@dataclass(frozen=True)
class _Mesh:
    """Stands for the mesh of these sizes until the body runs on a rank."""

    sizes: tuple[tuple[str, int], ...]


def rank_of(mark: pytest.Mark | None) -> _Rank:
    """The value of `ep_rank` for a test with this mark."""
    if mark is None:
        pytest.fail(f"ep_rank exists on ranks only: mark the test with {_USAGE}", pytrace=False)
    return _Rank()


def mesh_of(mark: pytest.Mark | None) -> _Mesh:
    """The value of `ep_mesh` for a test with this mark."""
    if mark is None or not _read(mark).mesh:
        pytest.fail("ep_mesh needs sizes: mark the test with @pytest.mark.ep_ranks(fsdp=2, ep=2)", pytrace=False)
    return _Mesh(_read(mark).mesh)


def run_marked(item: pytest.Function, mark: pytest.Mark, pools: RankPools, timeout: float) -> None:
    """Runs the body of a marked test on its ranks; fails with what became of each, skips or xfails where one does."""
    if inspect.iscoroutinefunction(item.obj):
        pytest.fail("a test on ranks cannot be a coroutine", pytrace=False)
    ranks = _read(mark)
    values = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters if name in item.funcargs}
    for name, value in values.items():
        _check_travels(item, name, value)
    failure = None
    try:
        ends = pools(ranks.world_size).run(_body, item.obj, values, timeout=ranks.timeout or timeout)
    except (RankError, TimeoutError) as error:
        failure = str(error)
    if failure is not None:  # raised here, so that pytest shows nothing but this text
        pytest.fail(failure, pytrace=False)
    left = next((end for end in ends if end is not None), None)
    if left is not None:
        left.leave()
        pytest.fail(f"a rank called pytest.xfail({left.reason!r}), which --runxfail does not take", pytrace=False)


def _body(rank: int, test: Callable[..., object], values: dict[str, Any]) -> _Left | None:
    """A test's own body, on a rank; how it left where it skips or xfails."""
    try:
        test(**{name: _made(rank, value) for name, value in values.items()})
    except pytest.skip.Exception as skip:
        return _Left("skip", str(skip.msg))
    except pytest.xfail.Exception as xfail:
        return _Left("xfail", str(xfail.msg))
    return None


def _made(rank: int, value: Any) -> Any:
    """What a fixture's value is on a rank."""
    if isinstance(value, _Rank):
        return rank
    return local_mesh(**dict(value.sizes)) if isinstance(value, _Mesh) else value


def _read(mark: pytest.Mark) -> _Ranks:
    sizes = dict(mark.kwargs)
    timeout = sizes.pop("timeout", None)
    world = mark.args[0] if mark.args else math.prod(sizes.values()) if sizes else 0
    good = all(isinstance(n, int) and n > 0 for n in (world, *sizes.values())) and len(mark.args) <= 1
    if not good or (sizes and world != math.prod(sizes.values())):
        given = ", ".join([*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())])
        pytest.fail(
            f"expected a number of ranks or the sizes of a mesh, {_USAGE}; got ep_ranks({given})", pytrace=False
        )
    return _Ranks(world, tuple(sizes.items()), timeout)


def _check_travels(item: pytest.Function, name: str, value: Any) -> None:
    """Fails the test where the value of a fixture cannot be sent to ranks, or would do nothing there."""
    reason = "it acts on this process" if name in _STAY else None
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = reason or str(error)
    if reason is not None:
        pytest.fail(
            f"{item.name} asks for {name!r}, a {type(value).__name__} that cannot be sent to ranks ({reason}); make "
            "what you need in the body, or run a function with the fixture ep_ranks",
            pytrace=False,
        )
