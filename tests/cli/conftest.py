"""Runs the command line in this process, and the graph of a tiny model as a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ep_fx.cli import main

MESH = ("--mesh", "fsdp=2,ep=2")


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="package")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of `models.tiny` on fsdp 2 x ep 2, as ``ep-fx transform`` writes it."""
    path = tmp_path_factory.mktemp("graph") / "graph.txt"
    assert main(["transform", "tests.cli.models:tiny", *MESH, "-o", str(path), "--json"]) == 0
    return path
