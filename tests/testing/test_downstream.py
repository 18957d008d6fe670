"""API-5: a project that depends on ep_fx has the plugin and the command line, in place and from the wheel alone.

The project also runs every example of docs/testing.md.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "downstream"
DOCUMENTED = "\n\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL))
TESTS = 12 + len(re.findall(r"^def test_", DOCUMENTED, re.MULTILINE))
"""Tests of the project, and examples of the docs."""


def run(command: list[str | Path], cwd: Path, seconds: float, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    result = subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def project_copy(tmp_path: Path) -> Path:
    """The project, with the examples among its tests, in a folder that is no part of this repository."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    project = Path(shutil.copytree(PROJECT, tmp_path / "project", ignore=ignored))
    (project / "tests" / "test_documented.py").write_text(DOCUMENTED)
    return project


@pytest.mark.timeout(180)  # ten seconds on an idle machine, mostly two imports of torch
def test_the_project_in_place(tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", "-p", "pytest_ep_fx", "-q"]
    command = [sys.executable, "-m", "pytest", *options]
    said = run(command, project_copy(tmp_path), 170, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert f"{TESTS} passed" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_project_from_the_wheel_alone(tmp_path: Path) -> None:
    """Torch and pytest come from this environment; ep_fx, its plugin and its command come from the wheel."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("ep_fx", "passes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "pytest_ep_fx.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source], tmp_path, 120)
    (wheel,) = tmp_path.glob("ep_fx-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], tmp_path, 60)
    python = tmp_path / "venv" / "bin" / "python"
    here = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path, 30).strip()
    run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], tmp_path, 60)
    others = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    Path(here, "others.pth").write_text("\n".join(others) + "\n")  # folders in it have no .pth files of their own read
    project = project_copy(tmp_path)
    found = run([python, "-c", "import ep_fx, pytest_ep_fx; print(ep_fx.__file__, pytest_ep_fx.__file__)"], project, 60)
    assert found.split() == [f"{here}/ep_fx/__init__.py", f"{here}/pytest_ep_fx.py"]
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-v"]
    said = run(command, project, 200, OMP_NUM_THREADS="1")
    assert f"{TESTS} passed" in said
    assert "ep_fx-" in next(line for line in said.splitlines() if line.startswith("plugins: "))
    assert "verify" in run([python.with_name("ep-fx"), "--help"], project, 60)


@pytest.mark.slow
def test_without_pytest_the_package_and_the_command_line_work(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("raise ImportError('no pytest here')\n")
    program = "import ep_fx.testing, ep_fx.cli; ep_fx.testing.assert_count"
    run([sys.executable, "-c", program], tmp_path, 60, PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
