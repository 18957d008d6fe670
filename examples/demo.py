"""The main job on this machine: a real MoE on 4 local ranks, transformed, verified, pictured and trained.

    python examples/demo.py            4 gloo ranks as a mesh of fsdp 2 x ep 2; needs no device and no download

Writes build/demo/graph.svg, graph.html and graph.txt. The ranks' own code is in demo_rank.py beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from demo_rank import Result, train
from rich.console import Console
from rich.table import Table

from ep_fx.testing.ranks import run_ranks

WORLD_SIZE = 4
TOLERANCE = 1e-4


def main() -> int:
    """Runs the demo; 1 where the two losses part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder for the pictures (default: build/demo)"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    console = Console()
    console.print(f"[bold]ep_fx[/bold]: Mixtral (2 layers, 8 experts) on {WORLD_SIZE} gloo ranks, mesh fsdp 2 x ep 2")
    started = time.perf_counter()
    folder = str(options.out.resolve())
    results = run_ranks(train, WORLD_SIZE, WORLD_SIZE, options.steps, folder, timeout=300)
    return report(console, results, time.perf_counter() - started)


def report(console: Console, results: list[Result], seconds: float) -> int:
    """Prints what the ranks found."""
    first = results[0]
    losses = [statistics.fmean(step) for step in zip(*(r.losses for r in results), strict=True)]
    table = Table(title="loss", title_justify="left")
    for column in ("step", "ep_fx on 4 ranks", "reference, 1 process", "difference"):
        table.add_column(column, justify="right")
    shown = sorted({*range(0, len(losses), max(1, len(losses) // 6)), len(losses) - 1})
    for step in shown:
        ours, theirs = losses[step], first.reference[step]
        table.add_row(str(step), f"{ours:.6f}", f"{theirs:.6f}", f"{abs(ours - theirs):.1e}")
    console.print(table)
    console.print("[bold]verifier[/bold]", first.report, sep="\n", highlight=False, soft_wrap=True)
    console.print("[bold]collectives of one step[/bold]", first.collectives, sep="\n", highlight=False, soft_wrap=True)
    console.print(
        f"{first.graph_nodes} nodes; built in {first.build_seconds:.1f} s, {first.step_seconds:.3f} s a step, "
        f"{seconds:.0f} s in all",
        highlight=False,
    )
    console.print("pictures: " + ", ".join(str(_relative(p)) for p in first.pictures), highlight=False, soft_wrap=True)
    worst = max(abs(a - b) for a, b in zip(losses, first.reference, strict=True))
    good = worst <= TOLERANCE
    console.print(
        f"[bold {'green' if good else 'red'}]largest difference of the loss: {worst:.1e}[/] (accepted: {TOLERANCE:g})"
    )
    return 0 if good else 1


def _relative(path: str) -> Path:
    try:
        return Path(path).relative_to(Path.cwd())
    except ValueError:
        return Path(path)


if __name__ == "__main__":
    sys.exit(main())
