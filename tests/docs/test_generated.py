"""GR-01: the tables in docs/ are what the graphs say today, and the README's promises about them hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_generated_parts_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "docs.generate", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_link_in_the_readme_leads_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize(("policy", "freed_after"), [("strict", "combine"), ("early", "grouped_mm")])
def test_ho05_the_documented_order_gathers_experts_before_dispatch_and_mirrors_it_in_backward(
    policy: str, freed_after: str
) -> None:
    """The block is what the graph says (the test above); this is what it must say."""
    block = re.search(
        rf"<!-- generated: order-{policy} -->\n```\n(.*?)```", (ROOT / "docs" / "expert_parallel.md").read_text(), re.S
    )
    assert block is not None
    lines = [line.split(maxsplit=1) for line in block[1].splitlines()]
    forward, backward = ([what for half, what in lines if half == name] for name in ("forward", "backward"))
    experts = "blocks.0.experts"

    def last(half: list[str], what: str) -> int:
        return max(i for i, line in enumerate(half) if line == what)

    freed_after_backward = "dispatch_backward" if policy == "strict" else "grouped_mm_backward"
    assert forward.index(f"unshard {experts}") < forward.index("dispatch") < forward.index("combine")
    assert forward.index(f"reshard {experts}") == last(forward, freed_after) + 1
    assert backward.index(f"unshard {experts}") < backward.index("combine_backward")
    assert backward.index("combine_backward") < backward.index("dispatch_backward")
    assert backward.index(f"reshard {experts}") == last(backward, freed_after_backward) + 1
    assert backward.count(f"reduce_grad {experts}") == 1
