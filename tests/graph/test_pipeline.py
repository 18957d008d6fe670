"""Pipelines as text: what is printed parses back to equal passes, and every error says what would be accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_fx.graph import ParallelGraph, Pass, parse_pipeline, print_pipeline


class Order(Enum):
    """Options by word: a value that is text names itself, another its member."""

    FIRST = "first-come"
    LAST = 2


@dataclass(frozen=True)
class Plain(Pass):
    """No options."""

    name: ClassVar[str] = "plain"

    def apply(self, graph: ParallelGraph) -> None:
        return


@dataclass(frozen=True)
class Rich(Pass):
    """An option of every kind."""

    name: ClassVar[str] = "rich"
    depth: int = 1
    share: float = 0.5
    on: bool = False
    label: str = ""
    mode: Literal["early", "late"] | None = None
    order: Order = Order.FIRST
    limit: int | float | None = None

    def apply(self, graph: ParallelGraph) -> None:
        return


@dataclass(frozen=True)
class Needy(Pass):
    """One option has no default, one no text form."""

    name: ClassVar[str] = "needy"
    depth: int
    hook: Any = field(default=None)

    def apply(self, graph: ParallelGraph) -> None:
        return


KNOWN: dict[str, type[Pass]] = {p.name: p for p in (Plain, Rich, Needy)}
RICH = st.builds(
    Rich,
    depth=st.integers(),
    share=st.floats(allow_nan=False),
    on=st.booleans(),
    label=st.text(),
    mode=st.sampled_from(["early", "late", None]),
    order=st.sampled_from(Order),
    limit=st.one_of(st.none(), st.integers(), st.floats(allow_nan=False)),
)


def test_a_pipeline_is_printed_without_the_options_that_have_their_defaults() -> None:
    text = "plain,rich{depth=3,mode=early,order=last},needy{depth=1},plain"
    assert print_pipeline(parse_pipeline(text, KNOWN)) == text
    assert str(Rich(depth=1, share=2, label="x y", limit=3)) == 'rich{share=2,label="x y",limit=3}'


@given(st.lists(st.one_of(RICH, st.just(Plain()), st.builds(Needy, st.integers())), max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_is_printed_parses_to_equal_passes(passes: list[Pass]) -> None:
    parsed = parse_pipeline(print_pipeline(passes), KNOWN)
    assert parsed == tuple(passes)
    assert [repr(p) for p in parsed] == [repr(p) for p in parse_pipeline(print_pipeline(parsed), KNOWN)]


def test_blanks_and_empty_braces_do_not_count() -> None:
    assert parse_pipeline(" plain , rich { depth = 2 , on = true } ", KNOWN) == (Plain(), Rich(depth=2, on=True))
    assert parse_pipeline("plain{}", KNOWN) == (Plain(),)
    assert parse_pipeline("  ", KNOWN) == ()


def test_words_are_read_by_the_annotation() -> None:
    (step,) = parse_pipeline("rich{label=3,order=first-come,share=inf,limit=0.25}", KNOWN)
    assert step == Rich(label="3", share=math.inf, limit=0.25)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fsdq", ["no pass 'fsdq'", "known passes: needy, plain, rich"]),
        ("rich{reshard=early}", ["no option 'reshard'", "depth: an integer; share: a number; on: true or false"]),
        ("rich{mode=soon}", ["'mode'", "expected early, late or none, got 'soon'"]),
        ("rich{order=2}", ["expected first-come, last, got '2'"]),
        ("rich{depth=0.5}", ["expected an integer, got '0.5'"]),
        ("rich{depth=none}", ["expected an integer, got 'none'"]),
        ("rich{on=yes}", ["expected true or false, got 'yes'"]),
        ("rich{depth=1,depth=2}", ["given twice"]),
        ("needy{hook=3,depth=1}", ["expected a Python object: it has no text form"]),
        ("needy", ["pass 'needy'", "'depth'"]),
        ("plain{x=1}", ["its options: none"]),
        ("plain plain", ["expected ',', got 'plain'"]),
        ("plain,", ["plain,"]),
        ("rich{depth", ["expected '='"]),
        ("rich{depth=", ["expected a value of 'depth'"]),
        ("rich{depth=}", ["expected a value of 'depth', got '}'"]),
        ("plain$", ["expected ',' at '$'"]),
    ],
)
def test_an_error_says_what_is_accepted(text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"pass|pipeline") as raised:
        parse_pipeline(text, KNOWN)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_values_given_in_python_are_checked_too() -> None:
    with pytest.raises(ValueError, match="pass 'rich', option 'mode': expected early, late or none, got 'soon'"):
        Rich(mode="soon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected an integer, got True"):
        Rich(depth=True)
    assert Needy(1, hook=print).hook is print


def test_a_pass_with_a_captured_object_has_no_text() -> None:
    with pytest.raises(TypeError, match="a builtin_function_or_method has no text form"):
        str(Needy(1, hook=print))
