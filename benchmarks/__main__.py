"""Runs every benchmark: ``python -m benchmarks [--pairs 30]``."""
from __future__ import annotations

import argparse

from benchmarks import capture_time, step_time, verify

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps")
    options = parser.parse_args()
    print("A training step, ep_fx against eager FSDP2 + expert parallelism\n")
    step_time.main(["--pairs", str(options.pairs)])
    print("\nA capture\n")
    capture_time.main([])
    print("\nRules and passes on large graphs\n")
    verify.main([])
