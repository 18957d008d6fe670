"""ranks: results by rank, failures with their traceback, time limits kept, nobody left behind."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ep_fx.testing.ranks import RankError, RankPool, RankPools, local_mesh, run_ranks


def summed(rank: int, offset: float) -> torch.Tensor:
    total = torch.full((2,), rank + offset)
    dist.all_reduce(total)
    return total + rank


def fails_on_two(rank: int) -> None:
    if rank == 2:
        raise ValueError("rank two says no")
    dist.barrier()


def fails_beside_a_size_nobody_knows(rank: int) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        found = torch.ones(3).nonzero()
        raise ValueError(f"no {found.dtype}")


def sleeps_on_one(rank: int) -> int:
    if rank == 1:
        time.sleep(30)
    return os.getpid()


def dies_on_zero(rank: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def mesh_identity(rank: int) -> tuple[int, int]:
    mesh = local_mesh(fsdp=2, ep=2)
    assert mesh is local_mesh(fsdp=2, ep=2)
    return mesh.get_local_rank("fsdp"), mesh.get_local_rank("ep")


def surroundings(rank: int) -> tuple[int, str, float, float]:
    from torch.distributed.distributed_c10d import _get_default_group

    groups = (_get_default_group(), local_mesh(fsdp=2, ep=2).get_group("ep"))
    seconds = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], *seconds


def draw(rank: int) -> float:
    return torch.rand(()).item()


def unpicklable(rank: int) -> object:
    return lambda: rank


def reports_and_sleeps(rank: int, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_results_come_by_rank(ranks: RankPools) -> None:
    results = ranks(4).run(summed, 0.5)
    assert [r.tolist() for r in results] == [[8.0 + rank] * 2 for rank in range(4)]


def test_new_ranks_give_the_same() -> None:
    assert [r.tolist() for r in run_ranks(summed, 2, 1.0)] == [[3.0, 3.0], [4.0, 4.0]]


def test_pool_keeps_its_processes_and_meshes(ranks: RankPools) -> None:
    assert ranks(4).run(mesh_identity) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    pids = ranks(4).pids
    assert ranks(4).run(mesh_identity) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ranks(4).pids == pids


def test_ranks_have_one_thread_and_groups_that_give_up_after_40_s(ranks: RankPools) -> None:
    assert ranks(4).run(surroundings) == [(1, "1", 40.0, 40.0)] * 4


def test_every_call_starts_from_the_same_seed(ranks: RankPools) -> None:
    first = ranks(2).run(draw)
    assert first == ranks(2).run(draw)
    assert first[0] == first[1]


def test_an_exception_on_rank_2_surfaces_with_its_traceback_and_the_pool_recovers(ranks: RankPools) -> None:
    ranks(4).run(draw)
    pids = ranks(4).pids
    with pytest.raises(RankError, match="rank 2 of 4 failed: ValueError: rank two says no") as caught:
        ranks(4).run(fails_on_two)
    assert caught.value.rank == 2
    assert "in fails_on_two" in caught.value.report
    assert "rank two says no" in caught.value.report
    assert isinstance(caught.value.__cause__, ValueError)
    assert "ranks 0, 1, 3 were still running:" in str(caught.value)
    assert re.search(r"    dist.barrier\(\)\n  .. \d frames in torch", str(caught.value))
    assert not any(map(alive, pids))
    assert len(ranks(4).run(draw)) == 4


def test_a_tensor_of_unknown_size_in_the_failing_line_does_not_hide_the_failure(ranks: RankPools) -> None:
    with pytest.raises(RankError, match=r"no torch.int64(.|\n)*where found = int64 \[u0, 1\]"):
        ranks(2).run(fails_beside_a_size_nobody_knows)


def test_a_hang_on_one_rank_ends_within_the_limit_and_leaves_no_process() -> None:
    with RankPool(2) as pool:
        pool.run(draw)
        pids = pool.pids
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 were still in sleeps_on_one after 1 s") as caught:
            pool.run(sleeps_on_one, timeout=1)
        assert time.monotonic() - started < 10
        where = r"rank 1 was still running:\n  test_ranks.py:\d+ in sleeps_on_one\n    time.sleep\(30\)"
        assert re.search(where, str(caught.value))
        assert "rank 0 had finished" in str(caught.value)
        assert not any(map(alive, pids))
        assert pool.pids == []
        assert len(pool.run(draw)) == 2


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="ended with exit code 7"):
        run_ranks(dies_on_zero, 2)


def test_a_result_that_cannot_be_pickled_is_an_error_not_a_hang() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(unpicklable, 1)


def test_closing_a_pool_leaves_no_process() -> None:
    pool = RankPool(2)
    pool.run(draw)
    pids = pool.pids
    pool.close()
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_busy_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = f"""
from ep_fx.testing import run_ranks
from tests.testing.test_ranks import reports_and_sleeps
if __name__ == "__main__":
    run_ranks(reports_and_sleeps, 2, {str(tmp_path)!r})
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment)
    assert wait_for(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2, 50)
    parent.kill()
    parent.wait()
    pids = [int(path.name) for path in tmp_path.glob("[0-9]*")]
    assert wait_for(lambda: not any(map(alive, pids)), 5)
