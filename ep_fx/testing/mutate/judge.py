"""Which mutants are at fault, which of them the rules catch, and the table that says so.

    at fault      the oracle sees a difference, a crash or a hang
    caught        a rule is broken, or the ranks' collectives differ (`spmd`, compared by all ranks at transform)
    missed        at fault, and nobody noticed: a hole in the rules
    no fault      runs as the valid graph does, perhaps in another order; rejected or not, it does not count
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ep_fx.graph import ParallelGraph
from ep_fx.graph.fingerprint import collective_lines
from ep_fx.testing.mutate.mutants import Mutant
from ep_fx.testing.mutate.oracle import Oracle
from ep_fx.testing.mutate.subject import Subject
from ep_fx.verify import verify

_HEAD: tuple[str, ...] = ("operator", "mutants", "at fault", "caught", "missed", "no fault", "caught by")


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Args:
        subject: name of the valid graph.
        operators: what was done to it.
        seed: of the edits.
        faults: what the oracle saw; empty for a run as good as the valid one.
        rules: ids of the rules that are broken.
    """

    subject: str
    operators: tuple[str, ...]
    seed: int
    faults: tuple[str, ...]
    rules: tuple[str, ...]

    @property
    def missed(self) -> bool:
        """At fault, and no rule noticed."""
        return bool(self.faults) and not self.rules

    def __str__(self) -> str:
        what = " + ".join(self.operators)
        return f"{what} on {self.subject!r} (seed {self.seed}): {self.faults[0] if self.faults else 'no fault'}"


def caught_by(subject: Subject, mutant: Mutant) -> tuple[str, ...]:
    """The rules that a mutant breaks; types are looked at, as in a transform, after all others have passed."""
    broken = verify(mutant.graph).broken
    if mutant.ranks is not None and collective_lines(mutant.graph) != collective_lines(subject.graph):
        broken = (*broken, "spmd")
    return broken or verify(mutant.graph, ["types"]).broken


def judge(oracle: Oracle, subject: Subject, mutant: Mutant) -> Verdict:
    """Asks the rules, then the oracle; what the rules let pass and the oracle does not is run a second time."""
    rules = caught_by(subject, mutant)
    graphs = graphs_of(subject, mutant)
    faults = oracle.faults(subject, graphs)
    if faults and not rules:
        faults = oracle.faults(subject, graphs)
    return Verdict(subject.name, mutant.operators, mutant.seed, tuple(faults), rules)


def graphs_of(subject: Subject, mutant: Mutant) -> list[ParallelGraph]:
    """The graph that each rank runs."""
    ranks = range(subject.world_size) if mutant.ranks is None else mutant.ranks
    return [mutant.graph if rank in ranks else subject.graph for rank in range(subject.world_size)]


def table(verdicts: Sequence[Verdict], names: Iterable[str]) -> str:
    """One line for each operator, a line for all mutants, and every survivor."""
    rows = [_HEAD, *(_row(name, [v for v in verdicts if name in v.operators]) for name in names)]
    rows.append(_row("all mutants", verdicts))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:6], widths[1:], strict=True)]
        lines.append(" | ".join([row[0].ljust(widths[0]), *numbers, row[6]]))
    survivors = [f"  missed: {v}" for v in verdicts if v.missed]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *survivors])


def _row(name: str, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    guilty = [v for v in verdicts if v.faults]
    missed = sum(v.missed for v in guilty)
    rules = Counter(rule for v in guilty for rule in v.rules)
    numbers = (len(verdicts), len(guilty), len(guilty) - missed, missed, len(verdicts) - len(guilty))
    return (name, *map(str, numbers), ", ".join(f"{rule} {n}" for rule, n in rules.most_common(5)))


def rate(verdicts: Iterable[Verdict], without: str = "") -> float:
    """Which part of the mutants at fault was caught, by other rules than `without`."""
    guilty = [v for v in verdicts if v.faults]
    return sum(bool(set(v.rules) - {without}) for v in guilty) / len(guilty) if guilty else 1.0
