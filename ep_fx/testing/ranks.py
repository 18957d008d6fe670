"""Functions on N local ranks, one process each, that end in time whatever happens.

    results = run_ranks(fn, 4, argument)             fn(rank, argument) on 4 new ranks; results by rank
    with RankPool(4) as pool: pool.run(fn, argument)    the same on ranks that stay alive

Ranks are forked from a server that imported torch once, so a pool of 4 starts in well under a second. A function
travels by name: it must stand at the top of a module. An exception on a rank ends the call with `RankError`, a rank
that does not answer with `TimeoutError`; both say what became of every rank. Then all ranks are killed, and the pool
makes new ones at its next call.
"""
from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ep_fx.testing.failures import RankState, describe, short_stack, short_traceback
from ep_fx.testing.tasks import pack, unpack

T = TypeVar("T")

Device = Literal["cpu", "npu"]
BACKENDS: dict[Device, str] = {"cpu": "gloo", "npu": "hccl"}
"""The backend of the process groups of ranks on a device; "npu" is the one of `ep_fx.testing.npu`."""

GROUP_TIMEOUT = timedelta(seconds=40)
"""After this long a collective fails on its rank."""
START_LIMIT = 180.0
"""Seconds that the ranks may take to start; most of it is the fork server importing torch, once per session."""


GRACE = 0.3
"""Seconds that the other ranks have to answer once one has failed: its cause is often clear only beside theirs."""


class RankError(RuntimeError):
    """A function failed on a rank.

    Args:
        rank: the first rank that reported, or the one that died.
        report: the whole traceback of that rank, as text.
        states: what became of each rank; the text of the error.

    ``__cause__`` is the rank's exception where it can be pickled.
    """

    def __init__(self, rank: int, report: str, states: tuple[RankState, ...]) -> None:
        super().__init__(describe(states))
        self.rank = rank
        self.report = report
        self.states = states


class _Answer(NamedTuple):
    """What a rank sends: a value, or for an exception its traceback, whole and short, and itself, pickled."""

    failed: bool
    value: Any
    short: str = ""
    cause: bytes = b""
    died: bool = False


# -- in the parent -----------------------------------------------------------------------------------------------------
@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def warm_up() -> ForkServerContext:
    """Starts the fork server and returns its context at once; called early, its imports run beside other work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ep_fx.testing.preload"])
    root = str(Path(__file__).parents[2])  # the server knows PYTHONPATH, but not this process's sys.path
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with _environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONPATH=path):
        forkserver.ensure_running()
    return context


class RankPool:
    """Ranks that stay alive between calls, with an initialised process group.

    Args:
        world_size: number of ranks.
        device: of the ranks. "npu" is made in their processes, by `ep_fx.testing.npu`, not in this one.

    Raises:
        ValueError: fewer than one rank.
    """

    def __init__(self, world_size: int, device: Device = "cpu") -> None:
        if world_size < 1:
            raise ValueError(f"world_size: expected 1 rank or more, got {world_size}; no rank would run the function")
        self.world_size = world_size
        self.device = device
        self._processes: list[BaseProcess] = []
        self._connections: list[connection.Connection] = []
        self._scratch: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process id of each rank; empty while there are none."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
        """Calls ``fn(rank, *args)`` on every rank and returns the results by rank.

        The generator of each rank is seeded with 0 before the call.

        Args:
            fn: a function at the top of an importable module.
            args: anything that can be pickled.
            timeout: seconds for the call, the start of the ranks not counted.

        Raises:
            RankError: `fn` raised on a rank, or a rank died.
            TimeoutError: a rank did not answer in time; the message shows where each such rank was.
            TypeError: `fn` or an argument cannot be sent to another process.
        """
        __tracebackhide__ = True
        name = getattr(fn, "__qualname__", repr(fn))
        task = pack(fn, args)
        try:
            if not self._processes:
                self._start()
            for link in self._connections:
                link.send_bytes(task)
            return self._collect(name, timeout)
        except BaseException:  # an interrupt or a test's own timeout leaves ranks in an unknown state too
            self._kill()
            raise

    def close(self) -> None:
        """Ends the ranks; idle ones end by themselves."""
        for link in self._connections:
            link.close()
        deadline = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = warm_up()
        self._scratch = Path(tempfile.mkdtemp(prefix="ep_fx_ranks_"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self.device, str(self._scratch), theirs)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()  # so that the rank's death ends our side
            self._processes.append(process)
            self._connections.append(ours)
        self._collect("the start", START_LIMIT)

    def _collect(self, name: str, timeout: float) -> list[Any]:
        """One answer from every rank; a failure, or the end of `timeout`, raises."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        waiting = {link: rank for rank, link in enumerate(self._connections)}
        answers: dict[int, _Answer] = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for link in ready:
                assert isinstance(link, connection.Connection)
                rank = waiting.pop(link)
                answers[rank] = self._receive(link, rank)
                if answers[rank].failed:
                    deadline = min(deadline, time.monotonic() + GRACE)
        failed = [rank for rank, answer in answers.items() if answer.failed]
        if not failed and not waiting:
            return [answers[rank].value for rank in range(self.world_size)]
        states = self._states(answers, sorted(waiting.values()))
        if not failed:
            running = sorted(waiting.values())
            head = f"ranks {running} of {self.world_size} were still in {name} after {timeout:g} s"
            raise TimeoutError(f"{head}\n{describe(states)}")
        first = next((rank for rank in failed if answers[rank].died), failed[0])
        cause = answers[first].cause
        raise RankError(first, answers[first].value, states) from (pickle.loads(cause) if cause else None)

    def _receive(self, link: connection.Connection, rank: int) -> _Answer:
        try:
            return _Answer(*pickle.loads(link.recv_bytes()))
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(1)
            said = f"its process ended with exit code {self._processes[rank].exitcode}"
            return _Answer(True, said, said, died=True)

    def _states(self, answers: dict[int, _Answer], running: list[int]) -> tuple[RankState, ...]:
        """What became of every rank; those that run on are asked where they are."""
        for rank in running:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.2 if running else 0)
        assert self._scratch is not None
        states = [RankState(r, "running", short_stack((self._scratch / f"stack{r}").read_text())) for r in running]
        for rank, (failed, _, short, _, died) in answers.items():
            states.append(RankState(rank, "died" if died else "failed" if failed else "finished", short))
        return tuple(sorted(states, key=lambda state: state.rank))

    def _kill(self) -> None:
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + 1
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        for link in self._connections:
            link.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._processes, self._connections, self._scratch = [], [], None


class RankPools:
    """A pool for each world size and device, made when it is first asked for: ``pools(4).run(fn)``."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, Device], RankPool] = {}

    def __call__(self, world_size: int, device: Device = "cpu") -> RankPool:
        """The pool of `world_size` ranks on `device`."""
        return self._pools.setdefault((world_size, device), RankPool(world_size, device))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0) -> list[T]:
    """Calls ``fn(rank, *args)`` on `world_size` new ranks; see `RankPool.run`."""
    with RankPool(world_size) as pool:
        return pool.run(fn, *args, timeout=timeout)


# -- on a rank ---------------------------------------------------------------------------------------------------------
@functools.cache
def local_mesh(**sizes: int) -> DeviceMesh:
    """The mesh of the ranks with these dimensions, e.g. ``local_mesh(fsdp=2, ep=2)``; one object per rank and shape.

    To be called on every rank of the pool in the same order, as it makes process groups.
    """
    backend = dist.get_backend()
    device = next(device for device, theirs in BACKENDS.items() if theirs == backend)
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _serve(rank: int, world_size: int, device: Device, scratch: str, link: connection.Connection) -> None:
    """The life of a rank: join the group, answer calls until the parent hangs up."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    stack = open(Path(scratch) / f"stack{rank}", "w")  # noqa: SIM115  (faulthandler writes to it as long as we live)
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported stays: no collection need look at it
    link.send_bytes(_answer(lambda: _join_group(rank, world_size, device, scratch)))
    while True:
        try:
            task = link.recv_bytes()
        except EOFError:
            break
        torch.manual_seed(0)
        link.send_bytes(_answer(lambda task=task: _execute(rank, task)))  # type: ignore[misc]
    sys.stdout.flush()
    os._exit(0)  # nothing to save, and tearing gloo down can wait for peers that are gone


def _join_group(rank: int, world_size: int, device: Device, scratch: str) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "npu":
        from ep_fx.testing.npu import install

        install()
    # Groups made later take this default, not the timeout of the first group.
    dist.distributed_c10d.default_pg_timeout = GROUP_TIMEOUT
    store = FileStore(str(Path(scratch) / "store"), world_size)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


def _execute(rank: int, task: bytes) -> Any:
    fn, args = unpack(task)
    return fn(rank, *args)


def _answer(call: Callable[[], Any]) -> bytes:
    """What `call` returned or raised, as the fields of an `_Answer`, pickled."""
    try:
        return pickle.dumps((False, call()))
    except BaseException as error:  # pytest's own failures are no `Exception`; the parent must hear of them too
        report = "".join(traceback.format_exception(error))
        return pickle.dumps((True, report, short_traceback(error), _portable(error)))


def _portable(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""  # the traceback, as text, says the same
    return data


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
