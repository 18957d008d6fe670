"""``ep-fx`` on a graph of this project."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ep_fx
from ep_fx.cli import main


def run(*arguments: str) -> int:
    """The installed command; where ep_fx is on the path but not installed, what the command calls."""
    command = Path(sys.executable).with_name("ep-fx")
    return subprocess.run([command, *arguments], check=False).returncode if command.exists() else main(arguments)


def test_the_printed_graph_verifies(module: ep_fx.EPModule, tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(module.print_graph())
    assert run("verify", str(path)) == 0
    path.write_text(module.print_graph().replace("4.0)", "2.0)"))
    assert main(["verify", str(path)]) == 1
