"""``pip install`` of the wheel alone gives the command line: it needs nothing but what the wheel itself requires."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = '''
import torch
from torch import nn
import ep_fx


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = ep_fx.nn.GroupedExperts(dim=16, hidden=32, num_experts=4)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2)
        order = ids.flatten().argsort(stable=True)
        counts = (ids.flatten() == torch.arange(4, device=x.device).unsqueeze(1)).sum(1)
        rows = self.experts(x[order // 2], counts)
        y = torch.zeros_like(rows).index_copy(0, order, rows).view(*ids.shape, -1)
        return x + (y * weights.unsqueeze(-1)).sum(1)


def build():
    return Block(), (torch.zeros(6, 16),)
'''


def required(lines: list[str]) -> list[str]:
    """Names in ``Requires-Dist`` that no extra asks for and that hold on this platform."""
    plain = [line for line in lines if "extra ==" not in line and "platform_system ==" not in line]
    return [re.match(r"[\w.-]+", line)[0] for line in plain if "sys_platform" not in line]  # type: ignore[index]


def closure(names: list[str]) -> list[Distribution]:
    """The distributions called `names` and all that they need, as installed here."""
    found: dict[str, Distribution] = {}
    while names:
        name = names.pop()
        if name not in found:
            found[name] = distribution(name)
            names += required(found[name].requires or [])
    return list(found.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_and_its_requirements_are_enough(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves files behind
    shutil.copytree(ROOT / "ep_fx", source / "ep_fx", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=120)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    info = next(site.glob("*.dist-info"))
    assert "ep-fx = ep_fx.cli:main" in (info / "entry_points.txt").read_text()
    needs = re.findall(r"^Requires-Dist: (.*)$", (info / "METADATA").read_text(), re.M)
    names = required(needs)
    assert {"torch", "networkx", "rich", "typer"} <= set(names)
    for needed in closure(names):
        for top in {file.parts[0] for file in needed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(str(needed.locate_file(top)))
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    assert not (site / "transformers").exists()
    (tmp_path / "mine.py").write_text(MODEL)
    for arguments in (["explain", "mine:build", "--mesh", "fsdp=2,ep=2", "--json"],
                      ["view", "mine:build", "--mesh", "fsdp=2,ep=2", "-o", "page.html", "--json"]):
        program = f"import sys; sys.path[:0] = ['', {str(site)!r}]; from ep_fx.cli import main; sys.exit(main())"
        ran = subprocess.run(
            [sys.executable, "-S", "-P", "-c", program, *arguments],
            cwd=tmp_path,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["bytes"] > 10_000
