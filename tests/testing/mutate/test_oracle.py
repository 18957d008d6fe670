"""The oracle sees on real ranks what is wrong, and nothing where all is well."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from ep_fx.testing.fake import fake_world
from ep_fx.testing.mutate import operators
from ep_fx.testing.mutate.judge import Verdict, graphs_of, judge, rate, table
from ep_fx.testing.mutate.mutants import mutant
from ep_fx.testing.mutate.oracle import Oracle
from ep_fx.testing.mutate.subject import Subject
from tests.testing.mutate.subjects import make, world_of

SEEN = {
    "drop-divisor": "gradient of", "drop-reshard": "values freed", "free-late": "bytes unsharded",
    "wait-twice": "waits", "save-gathered": "bytes saved", "gather-twice": "times _c10d_functional::all_gather",
    "keep-in-constant": "micro-batch 0", "change-target": "differs by",
}
"""Operators, and what the oracle must say of their mutants."""


@pytest.fixture(scope="module")
def subject() -> Subject:
    with fake_world(world_of("tiny, fsdp")):
        return make("tiny, fsdp")


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle(limit=2.0) as made:
        yield made


def test_the_valid_graph_and_its_copy_are_as_good_as_each_other(oracle: Oracle, subject: Subject) -> None:
    assert oracle.faults(subject, [subject.graph.copy()] * 2) == []


@pytest.mark.parametrize("name", SEEN)
def test_a_fault_is_seen_for_what_it_is(name: str, oracle: Oracle, subject: Subject) -> None:
    for seed in range(10):
        found = mutant(subject.graph, [operators()[name]], seed)
        faults = oracle.faults(subject, graphs_of(subject, found)) if found is not None else []
        if any(SEEN[name] in fault for fault in faults):
            return
    pytest.fail(f"no such fault seen in any mutant by {name}")


def test_ranks_that_disagree_are_at_fault_and_the_next_run_is_clean(oracle: Oracle, subject: Subject) -> None:
    found = mutant(subject.graph, [operators()["extra-on-one-rank"]], 0)
    assert found is not None
    assert found.ranks == (0,)
    verdict = judge(oracle, subject, found)
    assert verdict.faults
    assert not verdict.missed
    assert oracle.faults(subject, [subject.graph] * 2) == []


def test_the_table_names_survivors() -> None:
    verdicts = [
        Verdict("a", ("drop-wait",), 1, ("hangs",), ("wait",)), Verdict("a", ("drop-wait",), 2, ("hangs",), ()),
        Verdict("a", ("drop-wait",), 3, (), ()),
    ]
    text = table(verdicts, ["drop-wait"])
    assert "drop-wait   |       3 |        2 |      1 |      1 |        1 | wait 1" in text
    assert "missed: drop-wait on 'a' (seed 2): hangs" in text
    assert rate(verdicts) == 0.5
    assert rate(verdicts, without="wait") == 0.0
