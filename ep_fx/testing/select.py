"""Selectors: which nodes of a graph a test is about, composed in Python or written as text, and printed back.

    unshard("layers.0.experts")                    unshard[unit=layers.0.experts]
    dispatch("layers.0") & phase("forward")        dispatch[layer=layers.0] & node[phase=forward]
    (role("all_to_all") | reduce_grad()) & ~module("head")

A word names a role, or one half of a region's exchange (``dispatch``, ``combine``, ``dispatch_backward``,
``combine_backward``), whose nodes count as one match. Values are fnmatch patterns; a layer is a module path and all
below it. A value that nothing in the graph has is an error that lists those it has. docs/testing.md is the manual.
"""
from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from ep_fx.testing.graph_index import ANY, COLLECTIVE, FIELDS, ROLES, RUNS, WORDS, GraphIndex, NodeFacts, index_of

__all__ = [
    "Match", "Selector", "SelectorError", "all_reduce_grad", "collective", "combine", "combine_backward", "dispatch",
    "dispatch_backward", "grouped_mm", "layer", "module", "op", "over", "parameter", "phase", "reduce_grad", "reshard",
    "role", "unit", "unshard",
]

_PLAIN = re.compile(r"[\w.*?/:-]+")
_SHOWN = 12


class SelectorError(ValueError):
    """A selector names what does not exist: a word, a field, or a value that nothing in the graph has."""


@dataclass(frozen=True)
class Match:
    """What a selector counts as one: a node, or all nodes of one half of a region's exchange.

    Args:
        nodes: in order; at least one.
        first, last: positions of the first and the last node in the graph.
    """

    nodes: tuple[fx.Node, ...]
    first: int
    last: int


class Selector(ABC):
    """A set of nodes of any graph. ``a & b``: in both; ``a | b``: in either; ``~a``: not in it."""

    def find(self, graph: Any) -> list[Match]:
        """Its matches in a graph or a transformed module, in the order of their first nodes.

        Raises:
            SelectorError: it asks for a value that nothing in the graph has.
        """
        hits = {tuple(fact.position for fact in hit): hit for hit in self.hits(index_of(graph))}
        return [Match(tuple(f.node for f in hits[p]), p[0], p[-1]) for p in sorted(hits)]

    @abstractmethod
    def hits(self, index: GraphIndex) -> list[Sequence[NodeFacts]]:
        """The matches as they are found: each a list of nodes in order."""

    @property
    def groups(self) -> bool | None:
        """Whether its matches are halves of exchanges (True), nodes (False), or whatever is selected beside it."""
        return None

    @property
    def parts(self) -> tuple[Selector, ...]:
        """What it is composed of."""
        return ()

    def __and__(self, other: Selector) -> Selector:
        return All((*_flat(All, self), *_flat(All, other)))

    def __or__(self, other: Selector) -> Selector:
        return Some((*_flat(Some, self), *_flat(Some, other)))

    def __invert__(self) -> Selector:
        return self.part if isinstance(self, Not) else Not(self)


@dataclass(frozen=True)
class Atom(Selector):
    """A word, and what the nodes have in some fields.

    Args:
        word: one of `WORDS`.
        fields: pairs of one of `FIELDS` and a pattern, in the order of `FIELDS`.

    Raises:
        SelectorError: an unknown word or field.
    """

    word: str
    fields: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.word not in WORDS:
            raise SelectorError(_unknown("word", self.word, WORDS))
        for name, _ in self.fields:
            if name not in FIELDS:
                raise SelectorError(_unknown("field", name, FIELDS))
        object.__setattr__(self, "fields", tuple(sorted(self.fields, key=lambda item: FIELDS.index(item[0]))))

    def hits(self, index: GraphIndex) -> list[Sequence[NodeFacts]]:
        self._check(index)
        found = [fact for fact in index.facts if self.word in fact.words and self._fits(fact)]
        return _runs(found) if self.groups else [[fact] for fact in found]

    @property
    def groups(self) -> bool | None:
        return None if self.word == ANY else self.word in RUNS

    def without(self, name: str) -> Atom:
        """The same with nothing asked of one field."""
        return Atom(self.word, tuple(item for item in self.fields if item[0] != name))

    def alone(self) -> Atom:
        """The same with nothing asked of any field."""
        return Atom(self.word)

    def _fits(self, fact: NodeFacts) -> bool:
        return all(any(_fits(value, name, pattern) for value in fact.values[name]) for name, pattern in self.fields)

    def _check(self, index: GraphIndex) -> None:
        for name, pattern in self.fields:
            known = ["forward", "backward"] if name == "phase" else index.known(name)
            if not any(_fits(value, name, pattern) for value in known):
                raise SelectorError(f"{self}: {_unknown(name, pattern, known, 'in this graph')}")

    def __str__(self) -> str:
        fields = ",".join(f"{name}={_quoted(pattern)}" for name, pattern in self.fields)
        return f"{self.word}[{fields}]" if fields else self.word


@dataclass(frozen=True)
class _Several(Selector):
    """Composed of `members`: halves of exchanges where all that say so are."""

    members: tuple[Selector, ...]

    @property
    def groups(self) -> bool | None:
        said = [part.groups for part in self.members if part.groups is not None]
        return all(said) if said else None

    @property
    def parts(self) -> tuple[Selector, ...]:
        return self.members


@dataclass(frozen=True)
class All(_Several):
    """What every one of `members` selects."""

    def hits(self, index: GraphIndex) -> list[Sequence[NodeFacts]]:
        sets = [{fact for hit in part.hits(index) for fact in hit} for part in self.members]
        found = [fact for fact in index.facts if all(fact in facts for facts in sets)]
        return _runs(found) if self.groups else [[fact] for fact in found]

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Some) else str(part) for part in self.members)


@dataclass(frozen=True)
class Some(_Several):
    """What one of `members` selects."""

    def hits(self, index: GraphIndex) -> list[Sequence[NodeFacts]]:
        return [hit for part in self.members for hit in part.hits(index)]

    def __str__(self) -> str:
        return " | ".join(map(str, self.members))


@dataclass(frozen=True)
class Not(Selector):
    """Every node that `part` does not select."""

    part: Selector

    def hits(self, index: GraphIndex) -> list[Sequence[NodeFacts]]:
        selected = {fact for hit in self.part.hits(index) for fact in hit}
        return [[fact] for fact in index.facts if fact not in selected]

    @property
    def parts(self) -> tuple[Selector, ...]:
        return (self.part,)

    def __str__(self) -> str:
        return f"!{self.part}" if isinstance(self.part, Atom) else f"!({self.part})"


# -- words -------------------------------------------------------------------------------------------------------------
def role(word: str, **fields: str) -> Selector:
    """Nodes of one role, ``role("all_to_all")``, or any other word, with what they have in `FIELDS`."""
    return Atom(word, tuple(fields.items()))


def _word(word: str, field: str) -> Callable[..., Selector]:
    def select(pattern: str | None = None, /, **fields: str) -> Selector:
        return role(word, **fields) if pattern is None else role(word, **{field: pattern}, **fields)

    select.__name__ = select.__qualname__ = word
    select.__doc__ = f"Matches of ``{word}``; the pattern is for the field ``{field}``."
    return select


unshard, reshard = _word("unshard", "unit"), _word("reshard", "unit")
reduce_grad, all_reduce_grad = _word("reduce_grad", "unit"), _word("all_reduce_grad", "unit")
dispatch, combine = _word("dispatch", "layer"), _word("combine", "layer")
dispatch_backward, combine_backward = _word("dispatch_backward", "layer"), _word("combine_backward", "layer")
grouped_mm = _word("grouped_mm", "layer")
collective = _word(COLLECTIVE, "over")
unit, layer, phase, module, parameter, over, op = (_word(ANY, name) for name in FIELDS)


# -- helpers -----------------------------------------------------------------------------------------------------------
def _flat(kind: type[All] | type[Some], selector: Selector) -> tuple[Selector, ...]:
    return selector.parts if isinstance(selector, kind) else (selector,)


def _runs(found: Iterable[NodeFacts]) -> list[Sequence[NodeFacts]]:
    """Nodes of one run of one half of an exchange together."""
    runs: dict[Any, list[NodeFacts]] = {}
    for fact in found:
        runs.setdefault(fact.run or fact, []).append(fact)
    return list(runs.values())


def _fits(value: str, field: str, pattern: str) -> bool:
    return fnmatchcase(value, pattern) or (field == "layer" and fnmatchcase(value, f"{pattern}.*"))


def _quoted(pattern: str) -> str:
    return pattern if _PLAIN.fullmatch(pattern) else f'"{pattern}"'


def _unknown(what: str, name: str, known: Sequence[str], where: str = "") -> str:
    """``no unit 'laers.0' in this graph; did you mean 'layers.0'? There are: ...``"""
    close = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    shown = sorted(known, key=lambda k: -difflib.SequenceMatcher(None, name, k).ratio())[:_SHOWN]
    rest = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    listed = ", ".join(k for k in known if k in shown) or "none"
    return f"no {what} {name!r}{f' {where}' if where else ''}; {guess}there are: {listed}{rest}"


assert not set(ROLES) & set(RUNS), "a word has one meaning"
