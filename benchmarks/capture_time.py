"""What a capture costs: trace, passes and verification of a two-layer Mixtral, in CPU seconds of one process.

    python -m benchmarks.capture_time [--repeat 5]

Mesh (fsdp 2, ep 2) on a fake process group, batch and sequence dynamic, every pass verified. The first capture in a
process also pays for what torch imports and compiles when it is first used. Budget: 4 CPU seconds.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

import ep_fx
from benchmarks.models import mixtral, token_ids
from ep_fx.testing import fake_mesh

BUDGET = 4.0


def capture_seconds(repeat: int) -> list[float]:
    """CPU seconds of each of `repeat` captures of a new model, in this process."""
    torch.set_num_threads(1)
    with fake_mesh(fsdp=2, ep=2) as mesh:
        found = []
        for _ in range(repeat):
            module = ep_fx.transform(mixtral(layers=2), mesh)
            start = time.process_time()
            module.prepare(input_ids=token_ids(0))
            found.append(time.process_time() - start)
        return found


def report(seconds: Sequence[float]) -> str:
    """The figures, and whether they are within the budget."""
    first, rest = seconds[0], seconds[1:] or seconds
    verdict = "within" if max(seconds) < BUDGET else "OVER"
    return (
        f"capture + passes + verify, Mixtral with 2 layers, CPU s: first {first:.2f}; then min {min(rest):.2f}, "
        f"median {statistics.median(rest):.2f}, max {max(rest):.2f} ({verdict} the budget of {BUDGET:g})"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    print(report(capture_seconds(parser.parse_args(arguments).repeat)))


if __name__ == "__main__":
    main()
