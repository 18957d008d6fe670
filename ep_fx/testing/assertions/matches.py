"""Finding what an assertion is about, and saying what was found; a selector without a match fails with near misses."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import fx

from ep_fx.graph import Phase, info_of
from ep_fx.testing.graph_index import ANY, GraphIndex
from ep_fx.testing.select import Atom, Match, Selector

_SHOWN = 4


def matches_of(index: GraphIndex, selector: Selector) -> list[Match]:
    """The matches of `selector`, at least one.

    Raises:
        AssertionError: there is none; the message says what comes near.
    """
    __tracebackhide__ = True
    found = selector.find(index)
    if not found:
        raise AssertionError(said(f"nothing in the graph matches {selector}", *near_misses(index, selector)))
    return found


def by_phase(found: Iterable[Match]) -> dict[Phase, list[Match]]:
    """Matches by the half in which they begin."""
    halves: dict[Phase, list[Match]] = {}
    for match in found:
        halves.setdefault(info_of(match.nodes[0]).phase, []).append(match)
    return halves


def near_misses(index: GraphIndex, selector: Selector) -> list[str]:
    """What matches once one condition is left out."""
    if isinstance(selector, Atom):
        return _near_atom(index, selector)
    lines = []
    for part in selector.parts:
        found = part.find(index)
        lines += [f"{part} alone has {len(found)}:", *name_matches(index, found)]
    return lines


def _near_atom(index: GraphIndex, atom: Atom) -> list[str]:
    lines = []
    for name, pattern in atom.fields:
        found = atom.without(name).find(index)
        if found:
            had = dict.fromkeys(v for m in found for node in m.nodes for v in index.of[node].values[name])
            values = ", ".join(had) or "not known"
            lines += [f"without {name}={pattern} there are {len(found)}, whose {name} is {values}:"]
            lines += name_matches(index, found)
    if lines:
        return lines
    others = atom.alone().find(index)
    if others:
        return [f"each {atom.word} misses two or more of these conditions:", *name_matches(index, others)]
    words = Counter(word for fact in index.facts for word in fact.words if word != ANY)
    return [f"the graph has no {atom.word}; it has {', '.join(f'{n} {word}' for word, n in sorted(words.items()))}"]


def name_matches(index: GraphIndex, found: Sequence[Match]) -> list[str]:
    """One line for each match, as far as they go."""
    lines = [f"  {name_match(index, match)}" for match in found[:_SHOWN]]
    return lines + ([f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def name_match(index: GraphIndex, match: Match) -> str:
    """``%unshard_2 (forward, module 'layers.0', model.py:7)``, or first .. last node of several."""
    names = index.name(match.nodes[0])
    if len(match.nodes) > 1:
        names = f"{names} .. {index.name(match.nodes[-1])}"
    return f"{names} ({index.where(match.nodes[0])})"


def said(headline: str, *lines: str) -> str:
    """A message: its first line, and the others indented."""
    return "\n".join([headline, *(f"  {line}" for line in lines)])


def around(index: GraphIndex, nodes: Iterable[fx.Node]) -> list[str]:
    """The graph's text around `nodes`."""
    return ["around:", *index.around(list(nodes))]
