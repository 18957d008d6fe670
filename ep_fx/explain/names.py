"""From a name that a person typed to a node or a parameter: as the text form writes it, or as fx does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from ep_fx.graph import ParallelGraph, info_of, target_name
from ep_fx.graph.printer import GraphText
from ep_fx.graph.sizes import TypicalSizes
from ep_fx.graph.texts import plural, source_text
from ep_fx.verify import RULES, Facts, Violation

T = TypeVar("T")


class UnknownNameError(ValueError):
    """A name that the graph does not have, or that is of another kind than was asked for."""


@dataclass(frozen=True)
class Where:
    """A node: its name in the text form, its operator, its module path and the user's source line where known."""

    node: str
    operator: str
    module: str | None
    source: str | None

    def __str__(self) -> str:
        place = " ".join(x for x in (self.module, f"({source_text(self.source)})" if self.source else None) if x)
        what = "" if self.node.startswith(self.operator.strip("_")) else f" {self.operator}"
        return f"%{self.node}{what}" + (f" in {place}" if place else "")


@dataclass(frozen=True)
class Reason:
    """Why something is as it is: the rule that would be broken otherwise, what it says, and what it says here.

    Args:
        rule, sentence: the rule.
        here: what it says here; of a rule that this graph breaks, only what is due.
        broken: where and how this graph breaks it, a violation of what was asked about first; None where it holds.
    """

    rule: str
    sentence: str
    here: str
    broken: str | None = None

    def __str__(self) -> str:
        if self.broken is None:
            return f"rule {self.rule}: {self.here}"
        return f"rule {self.rule} is BROKEN in this graph: {self.broken}; ep-fx verify shows all of it"


class Subject:
    """One graph with everything that questions need; it must not change while this object is in use.

    Args:
        graph: the graph.
        sizes: other sizes of the inputs than the trace's, by their names in the text form.
    """

    def __init__(self, graph: ParallelGraph, sizes: Mapping[str, int] | None = None) -> None:
        self.graph = graph
        self.sizes = TypicalSizes(graph, sizes)
        self._asked = dict(sizes or {})
        self.facts = Facts(graph)
        self.text = GraphText(graph)
        self.nodes = {name: node for node, name in self.text.names.items()}
        self._violations: dict[str, tuple[Violation, ...]] = {}

    @property
    def sizes_text(self) -> tuple[str, bool]:
        """For which sizes of the inputs bytes are, "" where none is free, and whether some are only the trace's."""
        free = self.text.symbols.hints
        used = ", ".join(f"{name}={self._asked.get(name, size)}" for name, size in free.items())
        traced = not set(free) <= set(self._asked)
        return used + (", as in the trace and not of a run" if traced else ""), traced

    def where(self, node: fx.Node) -> Where:
        """`node` for a reader."""
        info = info_of(node)
        return Where(self.text.names[node], target_name(node).split("::")[-1], info.fqn, info.source)

    def reason(self, rule: str, here: str, about: Collection[fx.Node] = (), name: str | None = None) -> Reason:
        """The rule as a reason, checked on this graph.

        Args:
            rule: id of the rule.
            here: what it says of what was asked about, where it holds.
            about, name: nodes, and a parameter, whose violations are shown before others.
        """
        if rule not in self._violations:
            self._violations[rule] = tuple(RULES[rule].check(self.facts))
        found = self._violations[rule]
        if not found:
            return Reason(rule, RULES[rule].sentence, here)
        first = min(found, key=lambda v: (name not in re.split(r"[\s,:]+", v.expected), v.at not in about))
        more = f" ({plural(len(found) - 1, 'more violation')})" if len(found) > 1 else ""
        broken = f"at %{self.text.names.get(first.at, first.at.name)}: expected {first.expected}, got {first.got}{more}"
        return Reason(rule, RULES[rule].sentence, here, broken)

    def node(self, name: str, also: Iterable[str] = ()) -> fx.Node:
        """The node called `name`, with or without its ``%``.

        Args:
            also: other names that may have been meant, for the message.

        Raises:
            UnknownNameError: there is none; the message lists near misses.
        """
        name = name.strip().removeprefix("%")
        if name in self.nodes:
            return self.nodes[name]
        by_fx = {node.name: node for node in self.graph}
        return lookup(name, by_fx, "node", [*self.nodes, *also, *by_fx])


def lookup(name: str, known: Mapping[str, T], what: str, suggest: Iterable[str] | None = None) -> T:
    """The value of `name`.

    Raises:
        UnknownNameError: `known` has none; the message lists near misses among `suggest`, or among `known`.
    """
    if name in known:
        return known[name]
    options = list(dict.fromkeys(known if suggest is None else suggest))
    near = difflib.get_close_matches(name, options, 5)
    some = f"it has {plural(len(options), what)}, such as {', '.join(options[:5])}" if options else "it has none"
    hint = f"did you mean {', '.join(near)}?" if near else some
    raise UnknownNameError(f"the graph has no {what} {name!r}; {hint}")


def check_name(name: object, what: str, example: str) -> None:
    """Raises where a name is no text.

    Raises:
        TypeError: what was expected, and what came.
    """
    if not isinstance(name, str):
        kind = type(name).__name__
        raise TypeError(f"expected the name of a {what} as text, such as {example!r}, got {name!r} of type {kind}")
