"""A HuggingFace config folder: DeepSeek-V3 as published, on a mesh of 1,024 ranks; no weights and no network."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]
MESH = ("--mesh", "fsdp=64,ep=16", "--world", "1024")
LIMIT_SECONDS, LIMIT_BYTES = 90, 8 << 30
EXPERT = "model.layers.3.mlp.experts"


def deepseek(folder: Path, layers: int) -> Path:
    """The folder of a DeepSeek-V3-shaped model: published sizes, the given number of layers, the first three dense."""
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(num_hidden_layers=layers, first_k_dense_replace=3, dtype="bfloat16")
    assert (config.hidden_size, config.n_routed_experts, config.kv_lora_rank) == (7168, 256, 512)
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("offline")
def test_four_layers_on_1024_ranks_are_explained_without_weights_and_network(run: Run, tmp_path: Path) -> None:
    ran = run("explain", deepseek(tmp_path, 4), *MESH, "--seq", 128, "--json")
    assert ran.code == 0, ran.err
    check(ran.json, layers=4, rows=8 * 128)


def check(found: dict[str, Any], layers: int, rows: int) -> None:
    """What must hold of a DeepSeek-V3 with three dense layers on fsdp 64 x ep 16, worked out by hand.

    Args:
        rows: token-expert pairs that a rank sends.
    """
    moe = layers - 3
    units = {unit["name"]: unit for unit in found["units"]}
    assert found["data_ranks"] == 1024
    assert units[EXPERT]["kind"] == "experts"
    assert units[EXPERT]["full_bytes"] == 256 // 16 * 3 * 7168 * 2048 * 2
    assert units[EXPERT]["shard_bytes"] == units[EXPERT]["full_bytes"] // 64
    assert units[EXPERT]["gathers"] == [1, 1]
    count = {(row["phase"], row["kind"], row["dims"]): row["count"] for row in found["collectives"]}
    for phase, kinds in (("forward", ("dispatch", "combine")), ("backward", ("combine backward", "dispatch backward"))):
        assert [count[phase, kind, "ep"] for kind in kinds] == [moe, moe]
    assert count["forward", "dispatch counts", "ep"] == moe == len(found["host_syncs"])
    assert count["backward", "reduce_grad", "fsdp"] == moe
    sent = next(row for row in found["collectives"] if row["kind"] == "dispatch")
    assert (sent["ranks"], sent["typical"]) == (16, moe * rows * 7168 * 2)
    assert {row["divisor"] for row in found["reductions"]} == {1024.0}
    assert {tuple(row["due"]) for row in found["reductions"] if row["kind"] == "expert"} == {("fsdp",)}
    assert all(row["bytes"] > 0 for row in found["peaks"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_one_layers_on_1024_ranks_take_less_than_90_seconds_and_8_gib(tmp_path: Path) -> None:
    """CPU seconds and peak memory of the whole command, imports included."""
    folder = deepseek(tmp_path, 61)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "ep_fx.cli", "explain", str(folder), *MESH, "--json"]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 0, ran.stderr
    check(json.loads(ran.stdout), layers=61, rows=8 * 4096)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\n61 layers: {seconds:.1f} s of CPU, {after.ru_maxrss / 2**20:.2f} GiB")
    assert seconds < LIMIT_SECONDS
    assert after.ru_maxrss * 1024 < LIMIT_BYTES
