"""Every operator is a negative test: where it applies, some rule notices; the graphs it was made of offend no rule."""
from __future__ import annotations

import random

import pytest

from ep_fx.testing.fake import fake_world
from ep_fx.testing.mutate import Operator, operator, operators
from ep_fx.testing.mutate.judge import caught_by
from ep_fx.testing.mutate.mutants import mutant, mutants
from ep_fx.testing.mutate.subject import Subject
from ep_fx.verify import verify
from tests.testing.mutate.subjects import make, world_of
from tests.verify.builder import Step

OPERATORS = sorted(operators())
SMALL = (
    "tiny, fsdp x ep", "hand, ep", "counting, fsdp", "uneven, fsdp", "frozen, ep", "tiny, fsdp", "tiny, fsdp, early",
    "mixtral, ep", "tiny, replicate", "dropout, fsdp", "tiny, ep x tp",
)
"""Between them they give every operator something to break."""


class Subjects:
    """Valid graphs, each captured when it is first asked for."""

    def __init__(self) -> None:
        self._known: dict[str, Subject] = {}

    def __call__(self, name: str) -> Subject:
        if name not in self._known:
            with fake_world(world_of(name)):
                self._known[name] = make(name)
        return self._known[name]


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    return Subjects()


@pytest.mark.parametrize("name", OPERATORS)
def test_what_an_operator_breaks_is_noticed(name: str, subjects: Subjects) -> None:
    item = operators()[name]
    tried = 0
    for subject in map(subjects, SMALL):
        for seed in range(4):
            found = mutant(subject.graph, [item], seed)
            tried += found is not None
            if found is not None and caught_by(subject, found):
                return
    pytest.fail(f"{tried} mutants by {name}, none of them noticed: {item.sentence}")


@pytest.mark.parametrize("name", SMALL[:4])
def test_the_graphs_themselves_are_valid(name: str, subjects: Subjects) -> None:
    report = verify(subjects(name).graph, types=True)
    assert report.ok, report.explain()


def test_a_third_of_the_operators_is_blind() -> None:
    assert 3 * len(operators(families="blind")) >= len(operators()) >= 40


def test_operators_have_sentences_and_leave_the_graph_alone(subjects: Subjects) -> None:
    graph = subjects("hand, ep").graph
    before = str(graph.graph)
    for item in operators().values():
        assert item.sentence
        item(graph, random.Random(0))
    assert str(graph.graph) == before


def test_mutants_are_the_same_for_the_same_seed(subjects: Subjects) -> None:
    graph = subjects("hand, ep").graph
    first, again, other = ([str(m.graph.graph) for m in mutants(graph, 5, seed)] for seed in (3, 3, 4))
    assert first == again != other


def test_an_edit_that_fx_refuses_does_not_apply() -> None:
    @operator("use-first", "a node reads what comes later")
    def use_first(graph, rng):  # type: ignore[no-untyped-def]
        nodes = [n for n in graph if n.op == "call_function"]
        nodes[0].prepend(nodes[-1])
        return graph

    assert isinstance(use_first, Operator)
    assert use_first(Step().graph, random.Random(0)) is None
