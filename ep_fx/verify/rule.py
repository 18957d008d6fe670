"""What a rule is: an id, a sentence, a function; and what it says when it is broken."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from ep_fx.verify.facts import Facts


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule at one node.

    Args:
        at: the culprit.
        expected: what the rule wants here.
        got: what is here instead.
        remedy: what would mend it.
    """

    at: fx.Node
    expected: str
    got: str
    remedy: str


Check = Callable[["Facts"], Iterator[Violation]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule.

    Args:
        id: short name.
        sentence: what holds in a valid graph.
        check: yields the violations, and adds to ``facts.checked`` for each fact it looks at.
        optional: runs only where it is asked for by name.
    """

    id: str
    sentence: str
    check: Check
    optional: bool = False


def rule(id: str, sentence: str, *, optional: bool = False) -> Callable[[Check], Rule]:
    """Makes a line of the table (`ep_fx.verify.table`) of the decorated function."""
    return lambda check: Rule(id, sentence, check, optional)
