"""The pytest plugin: bodies on ranks from any folder, readable failures, nothing imported before a test asks."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ep_fx.testing.on_ranks  # what a run inside this process imports first is dropped after it
import ep_fx.testing.ranks  # noqa: F401

ROOT = Path(__file__).parents[2]
OTHERS = ("cacheprovider", "xdist", "timeout", "hypothesispytest", "anyio")
OPTIONS = (*(f"-pno:{name}" for name in OTHERS), "-p", "pytest_ep_fx", "--strict-markers")
ON_RANKS = '''
import pytest, threading, torch, torch.distributed as dist
from helpers import twice

def body(rank, by):
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return twice(total.item()) * by

def hangs(rank):
    if rank == 0:
        dist.barrier()

def test_call(ep_ranks):
    assert ep_ranks(2, body, 3) == [6, 6]

def test_timeout(ep_ranks):
    with pytest.raises(TimeoutError, match="rank 0 was still running:\\n  test_some.py:11 in hangs"):
        ep_ranks(2, hangs, timeout=1)

@pytest.mark.ep_ranks(2)
@pytest.mark.parametrize("by", [2, 5])
def test_mark(ep_rank, by, tmp_path):
    assert body(ep_rank, by) == 2 * by
    (tmp_path / str(ep_rank)).touch()

class TestMesh:
    @pytest.mark.ep_ranks(fsdp=2)
    def test_mesh(self, ep_mesh, ep_rank):
        assert ep_mesh.get_local_rank("fsdp") == ep_rank

@pytest.mark.ep_ranks(2)
def test_skip():
    pytest.skip("not today")

@pytest.mark.ep_ranks(2)
def test_xfail():
    pytest.xfail("not yet")

def leaves(rank, how):
    getattr(pytest, how)(f"said by {how}")

@pytest.mark.parametrize("how", ["skip", "xfail"])
def test_leaves(ep_ranks, how):
    ep_ranks(2, leaves, how)

def test_no_ranks(ep_ranks):
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"expected 1 rank or more, got {count};"):
            ep_ranks(count, body, 1)

@pytest.mark.ep_ranks(2)
def test_fails(ep_rank):
    limit = 1
    assert ep_rank < limit

@pytest.mark.ep_ranks(2)
def test_cannot_travel(monkeypatch):
    pass

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.mark.ep_ranks(2)
def test_cannot_be_pickled(lock):
    pass

@pytest.mark.ep_ranks(3, fsdp=2)
def test_wrong_mark():
    pass

def test_no_mark(ep_rank):
    pass

def test_closure(ep_ranks):
    ep_ranks(2, lambda rank: rank)
'''
SAID = (
    "rank 1 of 2 failed: AssertionError", "where limit = 1", "rank 0 had finished",
    "asks for 'monkeypatch', a MonkeyPatch that cannot be sent to ranks (it acts on this process)",
    "asks for 'lock', a lock that cannot be sent to ranks (cannot pickle",
    "got ep_ranks(3, fsdp=2)", "ep_rank exists on ranks only: mark the test with @pytest.mark.ep_ranks(4)",
    "test_closure.<locals>.<lambda>", "it must stand at the top of a module",
)


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_bodies_run_on_ranks(pytester: pytest.Pytester, mode: str) -> None:
    """The folder is none that this process's fork server knew when it started."""
    pytester.makepyfile(helpers="def twice(x):\n    return 2 * x\n")
    pytester.makepyfile(**{"deep/inside/test_some": ON_RANKS})
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess(*OPTIONS, f"--import-mode={mode}", "-rsx")
    result.assert_outcomes(passed=6, skipped=2, xfailed=2, failed=5, errors=1)
    text = result.stdout.str()
    assert [said for said in (*SAID, "not today", "not yet", "said by skip", "said by xfail") if said not in text] == []


def test_a_fake_mesh_is_gone_after_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch.distributed as dist

        def test_one(ep_fake_mesh):
            mesh = ep_fake_mesh(fsdp=64, ep=16)
            assert (mesh.shape, dist.get_world_size()) == ((64, 16), 1024)
            assert ep_fake_mesh(replicate=2, fsdp=2, rank=3).get_local_rank("fsdp") == 1
            for sizes, said in [({"foo": 2}, "got foo"), ({"ep": 2, "fsdp": 2}, "order fsdp, ep, got ep, fsdp"),
                                ({"ep": 0}, "got ..ep=0"), ({"ep": 2, "rank": 2}, "got rank=2"), ({}, "got none")]:
                with pytest.raises(ValueError, match=said):
                    ep_fake_mesh(**sizes)

        def test_two(ep_fake_mesh):
            assert not dist.is_initialized()
            dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
            with pytest.raises(ValueError, match="has a fake process group of 2 ranks already"):
                ep_fake_mesh(fsdp=4)
            dist.destroy_process_group()
        """
    )
    pytester.runpytest_inprocess(*OPTIONS).assert_outcomes(passed=2)


def test_golden_files_lie_beside_the_test(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(
        """
        def test_layer(graph_golden):
            graph_golden("the text of a graph", "layer")
        """
    )
    pytester.runpytest_inprocess(*OPTIONS).stdout.fnmatch_lines(["*no golden file */golden/layer.txt; make it with *"])
    pytester.runpytest_inprocess(*OPTIONS, "--update-golden").assert_outcomes(passed=1)
    assert (path.parent / "golden" / "layer.txt").read_text() == "the text of a graph"
    pytester.runpytest_inprocess(*OPTIONS).assert_outcomes(passed=1)


def test_events_of_the_tracer_are_no_lines_of_a_failure(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from ep_fx.testing.synthetic import parallel_step

        def test_golden(graph_golden):
            graph_golden(parallel_step(1), "layer")
        """
    )
    text = pytester.runpytest_inprocess(*OPTIONS).stdout.str()
    assert "no golden file" in text
    assert "torch.__trace" not in text


def test_torch_is_not_imported_before_a_test_asks(tmp_path: Path) -> None:
    """Every pytest of an environment with ep_fx loads the plugin, and twice where a conftest names it too."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["pytest_ep_fx"]\n')
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_other():\n    assert not {'torch', 'ep_fx'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_ep_fx", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert "1 passed" in result.stdout, result.stdout + result.stderr
