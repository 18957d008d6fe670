"""`make mutate`: 1,000 random mutants from 3 seeds, 12 seeded faults of gradient scale and order, 200 valid graphs.

Prints one line for each operator, every survivor, and the rate; fails below 99 % or at a false alarm.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from ep_fx.testing.fake import fake_world
from ep_fx.testing.mutate import operators
from ep_fx.testing.mutate.judge import Verdict, judge, rate, table
from ep_fx.testing.mutate.mutants import mutant, mutants_of
from ep_fx.testing.mutate.oracle import Oracle
from ep_fx.testing.mutate.subject import Subject
from tests.testing.mutate.subjects import NAMES, make, world_of
from tests.testing.mutate.valid import alarms

SEEDED = {
    "drop-divisor": "tiny, ep", "scale-twice": "tiny, fsdp", "divide-by-group": "tiny, fsdp x ep",
    "wrong-divisor": "mixtral, ep", "scale-gradient": "tiny, replicate", "reduce-too-many": "tiny, fsdp x ep",
    "reduce-too-few": "tiny, replicate", "reduce-twice": "qwen3, fsdp", "wrong-group": "tiny, fsdp x ep",
    "reorder-on-one-rank": "tiny, fsdp", "gather-experts-late": "tiny, fsdp x ep",
    "free-experts-early": "qwen3, fsdp",
}
"""Faults of gradient scale and of order, each on a graph where it is one."""
DUE = 0.99


def subjects(names: list[str]) -> dict[str, Subject]:
    """The named valid graphs."""
    found = {}
    for name in names:
        with fake_world(world_of(name)):
            found[name] = make(name)
    return found


def seeded(oracle: Oracle, known: dict[str, Subject]) -> Iterator[Verdict]:
    """One mutant for each of the seeded faults whose graph is among `known`."""
    table_of = operators()
    for name, subject in SEEDED.items():
        if subject not in known:
            continue
        verdicts = (
            judge(oracle, known[subject], found)
            for seed in range(40)
            if (found := mutant(known[subject].graph, [table_of[name]], seed)) is not None
        )
        yield next(v for v in verdicts if v.faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="mutants of all seeds together")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--subjects", nargs="+", default=list(NAMES), choices=NAMES, metavar="NAME")
    parser.add_argument("--valid", type=int, default=200, help="valid graphs to try")
    options = parser.parse_args()
    started = time.monotonic()
    known = subjects(options.subjects)
    verdicts: list[Verdict] = []
    with Oracle() as oracle:
        first = list(seeded(oracle, known))
        graphs = {name: subject.graph for name, subject in known.items()}
        for place, seed in enumerate(options.seeds, 1):
            share = options.count * place // len(options.seeds) - len(verdicts)
            for name, found in mutants_of(graphs, share, seed):
                verdicts.append(judge(oracle, known[name], found))
                if len(verdicts) % 50 == 0:
                    print(f"{time.monotonic() - started:6.0f} s  {len(verdicts)} mutants", file=sys.stderr, flush=True)
    print(table(verdicts, sorted(operators())))
    print(f"\n{len(first)} seeded faults of gradient scale and order: {sum(not v.missed for v in first)} caught")
    print("\n".join(f"  {v}\n    caught by {', '.join(v.rules) or 'nobody'}" for v in first))
    harmless = [v for v in verdicts if not v.faults]
    rejected = sum(bool(v.rules) for v in harmless)
    print(f"\n{len(harmless)} mutants run as well as the valid graph; the rules reject {rejected} of them")
    alone = sum(v.rules == ("computes",) for v in verdicts if v.faults)
    print(f"\ncaught by `computes` alone: {alone}; caught without it: {rate(verdicts, 'computes'):.1%}")
    checked, wrong = alarms(options.valid)
    print(f"\n{checked} valid graphs: {len(wrong)} false alarms", *wrong, sep="\n  ")
    print(f"\n{rate(verdicts):.2%} of the mutants at fault caught, in {time.monotonic() - started:.0f} s")
    return int(rate([*verdicts, *first]) < DUE or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
