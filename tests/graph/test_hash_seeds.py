"""Four ranks with four hash seeds print the same graph to the byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch, ep_fx
from ep_fx.testing import fake_mesh
from tests.models.tiny_moe import TinyMoE
with fake_mesh(rank=int(sys.argv[1]), fsdp=2, ep=2) as mesh:
    module = ep_fx.transform(TinyMoE(vocabulary=7), mesh, example_inputs=(torch.zeros(2, 6, dtype=torch.long),))
sys.stdout.write(module.print_graph())
"""


@pytest.mark.timeout(180)  # four interpreters start from nothing
def test_four_ranks_with_four_hash_seeds_print_the_same_graph() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(rank)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    texts = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert "dispatch blocks.0.moe.experts" in texts[0]
    assert len(set(texts)) == 1
