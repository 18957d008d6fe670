"""``ep-fx verify``: a printed graph is checked with nothing but its text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ep_fx.cli import main
from ep_fx.graph import Role
from ep_fx.graph.printer import print_graph
from ep_fx.testing.synthetic import Sizes, parallel_step
from tests.verify.builder import Step


def test_a_valid_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(print_graph(Step().graph))
    assert main(["verify", str(path)]) == 0
    assert "reduce-once" in capsys.readouterr().out


def test_a_dropped_reshard_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Step().graph
    graph.graph.erase_node(graph.nodes(Role.RESHARD)[0])
    path = tmp_path / "graph.txt"
    path.write_text(print_graph(graph))
    assert main(["verify", str(path)]) == 1
    assert "rule once" in capsys.readouterr().out
    assert main(["verify", str(path), "--rule", "divisor"]) == 0


def test_nodes_are_called_as_the_file_calls_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = parallel_step(1, Sizes())
    for node in graph.nodes(Role.SCALE_GRAD):
        node.args = (node.args[0], 2.0)
    path = tmp_path / "graph.txt"
    path.write_text(print_graph(graph))
    written = set(re.findall(r"%([\w.]+)", path.read_text()))
    assert main(["verify", str(path)]) == 1
    said = set(re.findall(r"%(\w[\w.]*)", capsys.readouterr().out))
    assert said <= written
    assert any("." in name for name in said)
    assert main(["verify", str(path), "--json"]) == 1
    rules = {rule["rule"]: rule["violations"] for rule in json.loads(capsys.readouterr().out)["rules"]}
    assert {violation["node"] for violation in rules["divisor"]} <= written


def test_what_is_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert main(["verify", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "missing.txt")]) == 2
