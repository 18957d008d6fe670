"""What goes wrong is one line on stderr with a documented exit code; the trace comes with ``--debug`` only."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ep_fx
from ep_fx.cli import app as application
from ep_fx.cli import main
from ep_fx.cli.failure import MEANING, Code
from ep_fx.graph import ParallelGraph, Role
from ep_fx.passes.fsdp import Fsdp
from tests.cli.conftest import MESH, Run

MODELS = "tests.cli.models"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("explain",), 2, "Missing argument 'SUBJECT'"),
        (("explian",), 2, "No such command 'explian'"),
        (("explain", "x", "--mash", "1"), 2, "No such option: --mash"),
        (("explain", "nowhere.txt"), 2, "'nowhere.txt' is no file; a model needs --mesh"),
        (("explain", "nowhere", *MESH), 2, "'nowhere' is no model: expected module:callable, or a folder"),
        (("explain", "no.such.module:f", *MESH), 2, "cannot import 'no.such.module'"),
        (("explain", f"{MODELS}:tinny", *MESH), 2, "has no 'tinny'; did you mean tiny"),
        (("explain", f"{MODELS}:number", *MESH), 2, "number gave (int); expected a model, (model, args)"),
        (("explain", f"{MODELS}:raising", *MESH), 2, "raising() raised RuntimeError: no such checkpoint"),
        (("explain", f"{MODELS}:leaving", *MESH), 2, "models:leaving() raised SystemExit: 0"),
        (("explain", f"{MODELS}:tiny", "--mesh", "fsdp"), 2, "expected dimensions and sizes, such as fsdp=64,ep=16"),
        (("explain", f"{MODELS}:tiny", "--mesh", "fsdp=2,fsdp=2"), 2, "got 'fsdp=2'"),
        (("explain", f"{MODELS}:tiny", "--mesh", "dp=2"), 2, "mesh dimensions ['dp']"),
        (("explain", f"{MODELS}:tiny", "--mesh", "ep=3"), 2, "num_experts 4 is not divisible by the mesh dimension"),
        (("explain", f"{MODELS}:tiny", *MESH, "--world", "8"), 2, "4 ranks, --world says 8; add replicate=2"),
        (("explain", f"{MODELS}:tiny", *MESH, "--pipeline", "fsdq"), 2, "fsdq"),
        (("explain", f"{MODELS}:branching", "--mesh", "fsdp=4"), 3, "branches or loops on the values of a tensor"),
        (("view", f"{MODELS}:tiny", *MESH, "-o", "picture.png"), 2, "the suffix says what to write"),
        (("transform", f"{MODELS}:tiny", *MESH, "-o", "picture.png"), 2, "the suffix says what to write"),
        (("verify", "x", "--rule", "nonsense"), 2, "no rule 'nonsense'; rules are order"),
    ],
)
def test_one_line_and_the_exit_code(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    ran = run(*arguments)
    lines = ran.err.splitlines()
    assert (ran.code, len(lines), ran.out) == (code, 1, "")
    assert lines[0].startswith("ep-fx: ")
    assert message in lines[0]
    assert not dist.is_initialized()


@pytest.mark.parametrize("debug", [False, True])
def test_what_torch_logs_of_an_error_comes_with_debug_only(
    run: Run, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handle", lambda record: logged.append(record.getMessage()))
    level = logger.level
    ran = run("explain", f"{MODELS}:floats", "--mesh", "fsdp=2", *(["--debug"] if debug else []))
    assert ran.code == Code.CAPTURE
    assert bool(logged) == debug
    assert debug or len(ran.err.splitlines()) == 1
    assert logger.level == level


def test_a_folder_without_a_config_and_one_of_an_unknown_kind(run: Run, tmp_path: Path) -> None:
    assert "has no config.json" in run("explain", tmp_path, *MESH).err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-the-future"}))
    ran = run("explain", tmp_path, *MESH)
    assert ran.code == 2
    assert "of-the-future" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_printed_graph_takes_no_mesh(run: Run, printed: Path) -> None:
    ran = run("verify", printed, *MESH)
    assert (ran.code, "leave --mesh out" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "2", "--dynamic"), "its mesh, sizes and passes: leave --batch, --dynamic out"),
        (("--seq", "4096"), "leave --seq out"),
        (("--pipeline", "fsdp"), "leave --pipeline out"),
        (("--world", "8"), "is a graph for 4 ranks, --world says 8"),
    ],
)
def test_what_says_nothing_of_a_printed_graph_is_refused(
    run: Run, printed: Path, options: tuple[str, ...], message: str
) -> None:
    for command in ("verify", "explain", "bench"):
        ran = run(command, printed, *options)
        assert (ran.code, message in ran.err, len(ran.err.splitlines())) == (2, True, 1)
    assert run("verify", printed, "--world", "4").code == 0


def test_a_damaged_printed_graph_is_one_line(run: Run, printed: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.txt"
    path.write_text(printed.read_text().replace("mesh fsdp 2 x ep 2", "mesh ep 2 x ep 2"))
    ran = run("verify", path)
    assert (ran.code, len(ran.err.splitlines()), "line 2: " in ran.err) == (2, 1, True)


def test_a_model_that_leaves_the_process_is_told_in_json(run: Run) -> None:
    ran = run("explain", f"{MODELS}:leaving", *MESH, "--json")
    assert (ran.code, ran.json["exit_code"]) == (2, 2)


@pytest.mark.parametrize("arguments", [(), ("--json",)])
@pytest.mark.parametrize(("full", "code"), [(True, Code.BUG), (False, Code.PIPE)])
def test_an_output_that_takes_nothing_is_one_line_or_the_code_of_a_closed_pipe(
    printed: Path, arguments: tuple[str, ...], full: bool, code: Code
) -> None:
    read, write = os.pipe()
    os.close(read)
    out = os.open("/dev/full", os.O_WRONLY) if full else write
    command = [sys.executable, "-m", "ep_fx.cli", "verify", str(printed), *arguments]
    ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == code
    assert ran.stderr == ("ep-fx: cannot write the output: No space left on device\n" if full else "")


def test_a_name_that_is_near_none_is_answered_with_examples(run: Run, printed: Path) -> None:
    ran = run("explain", printed, "--gradient", "nothere")
    assert (ran.code, "did you mean" in ran.err, "such as embedding.weight" in ran.err) == (2, False, True)


def test_an_unknown_node_is_answered_with_near_misses(run: Run, printed: Path) -> None:
    ran = run("explain", printed, "--why", "unshrd_1")
    assert (ran.code, "did you mean unshard_1" in ran.err) == (2, True)


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_the_trace_wherever_it_stands(run: Run, place: int) -> None:
    arguments = ["explain", f"{MODELS}:branching", "--mesh", "fsdp=4"]
    ran = run(*arguments[:place], "--debug", *arguments[place:])
    assert ran.code == 3
    assert "Traceback" in ran.err
    assert "models.py" in ran.err


def test_json_carries_the_error_too(run: Run) -> None:
    ran = run("explain", f"{MODELS}:number", *MESH, "--json")
    assert ran.code == 2
    assert ran.json["exit_code"] == 2
    assert ran.json["error"] in ran.err


def test_a_pass_that_breaks_a_rule_ends_with_the_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Fsdp.apply

    def forgets(self: Fsdp, graph: ParallelGraph) -> None:
        apply(self, graph)
        graph.graph.erase_node(graph.nodes(Role.RESHARD)[0])

    monkeypatch.setattr(Fsdp, "apply", forgets)
    ran = run("transform", f"{MODELS}:tiny", *MESH)
    assert ran.code == 1
    assert "rule once" in ran.out
    assert "broken rules: once" in ran.err


def test_an_unforeseen_error_is_one_line_as_well(run: Run, printed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ep_fx, "explain", lambda graph, sizes: 1 / 0)
    ran = run("explain", printed)
    assert (ran.code, ran.err) == (4, "ep-fx: ZeroDivisionError: division by zero (--debug shows the trace)\n")


def test_the_help_documents_every_exit_code(run: Run) -> None:
    ran = run("--help")
    assert ran.code == 0
    assert set(MEANING) == set(Code)
    for code in Code:
        assert f"{code.value}: {MEANING[code]}" in " ".join(ran.out.split())


def test_no_argument_is_help(run: Run) -> None:
    ran = run()
    assert ran.code == 2
    assert "Usage" in ran.out + ran.err
    assert "ep-fx: " not in ran.out + ran.err


def test_the_version(run: Run) -> None:
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("ep-fx ")
    assert torch.__version__ in ran.out


def test_the_installed_command_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'ep-fx = "ep_fx.cli:main"' in text
    assert callable(main)
    assert [command.name or command.callback.__name__ for command in application.registered_commands] == [  # type: ignore[union-attr]
        "transform", "explain", "verify", "view", "diff", "bench", "doctor"
    ]
