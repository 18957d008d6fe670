"""What a selector can ask about each node of a graph: words, unit, layer, phase, module, parameter, group, operator.

Read off targets, arguments and the Manifest (`Places`, `find_regions`); phase and module path, which are labels for
readers, are those that the graph's text shows. Two walks over the graph.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from ep_fx.graph import ParallelGraph, Role, find_regions, info_of, is_collective, role_of
from ep_fx.graph.operators import target_text
from ep_fx.graph.places import REGION_ACTIONS, Action, Places, group_argument
from ep_fx.graph.printer import GraphText
from ep_fx.graph.texts import group_text, source_text

ANY, COLLECTIVE = "node", "collective"
"""Words for every node, and for every node that communicates."""
RUNS = {action.value.replace(" ", "_"): action for action in REGION_ACTIONS}
"""Words for one half of a region's exchange: many nodes that count as one."""
_SHORT = {Role.EXCHANGE: "all_to_all", Role.WAIT: "wait", Role.CONTEXT: "context"}
ROLES = {
    _SHORT.get(role, role.value.split("::")[-1]): role for role in Role if role.value.split("::")[-1] not in RUNS
}
"""Words for roles: the name of the operator."""
WORDS = (*sorted(RUNS), *ROLES, COLLECTIVE, ANY)
FIELDS = ("unit", "layer", "phase", "module", "parameter", "over", "op")

_WORD_OF = {role: word for word, role in ROLES.items()}


@dataclass(frozen=True, eq=False, slots=True)
class NodeFacts:
    """One node.

    Args:
        node: the node.
        position: its place in the graph.
        words: names by which a selector calls it.
        values: for each field of a selector what the node has there; a gather of several parameters has several.
        run: number of the region's run and the half of its exchange that the node is part of.
    """

    node: fx.Node
    position: int
    words: frozenset[str]
    values: dict[str, tuple[str, ...]]
    run: tuple[int, Action] | None


@dataclass(eq=False)
class GraphIndex:
    """All nodes of a graph, which must not change while this object is in use.

    Args:
        graph: the graph.
    """

    graph: ParallelGraph
    facts: list[NodeFacts] = field(init=False)

    def __post_init__(self) -> None:
        places = Places(self.graph)
        regions = find_regions(self.graph)
        runs = {node: i for i, region in enumerate(regions) for nodes in region.members.values() for node in nodes}
        self.facts = [self._facts(node, i, places, runs) for i, node in enumerate(self.graph)]
        self.of = {fact.node: fact for fact in self.facts}

    def _facts(self, node: fx.Node, position: int, places: Places, runs: dict[fx.Node, int]) -> NodeFacts:
        info, place, role = info_of(node), places[node], role_of(node)
        owner = node.args[0] if role is Role.GETITEM else node
        run = None
        if place.action in REGION_ACTIONS and isinstance(owner, fx.Node) and owner in runs:
            run = (runs[owner], place.action)
        words = {ANY, _WORD_OF.get(role, ANY)} | ({COLLECTIVE} if is_collective(node) else set())
        words |= {word for word, action in RUNS.items() if run is not None and run[1] is action}
        specs = places.lists.get(node, ())
        alone = places.parameters.get(node) or places.gradients.get(node)
        parameters = (alone,) if alone is not None else specs
        units = tuple(dict.fromkeys(spec.unit for spec in parameters))
        group = group_argument(node)
        computes = place.action is Action.COMPUTE
        values: dict[str, tuple[str, ...]] = {
            "unit": units,
            "layer": (place.subject,) if not computes and place.subject else units or _known(info.fqn),
            "phase": (info.phase.value,),
            "module": _known(info.fqn),
            "parameter": tuple(spec.name for spec in parameters),
            "over": () if group is None else (group_text(group, self.graph.manifest.mesh),),
            "op": (target_text(node.target) if node.op == "call_function" else node.op,),
        }
        return NodeFacts(node, position, frozenset(words), values, run)

    @cached_property
    def text(self) -> GraphText:
        """The graph as text, piece by piece."""
        return GraphText(self.graph)

    def known(self, name: str) -> list[str]:
        """Every value that a node has in the field called `name`, sorted."""
        return sorted({value for fact in self.facts for value in fact.values[name]})

    def where(self, node: fx.Node) -> str:
        """``forward, module 'layers.0.experts', model.py:12``"""
        info = info_of(node)
        parts = [info.phase.value]
        parts += [f"module {info.fqn!r}"] if info.fqn else []
        parts += [source_text(info.source)] if info.source else []
        return ", ".join(parts)

    def name(self, node: fx.Node) -> str:
        """``%unshard_2``, as the graph's text calls it."""
        return f"%{self.text.names[node]}"

    def around(self, marked: Any, reach: int = 2) -> Iterator[str]:
        """Lines of the text around each of the `marked` nodes, which are marked; ``...`` where lines are left out."""
        places = {self.of[node].position for node in marked}
        shown = sorted({i for p in places for i in range(p - reach, p + reach + 1) if 0 <= i < len(self.facts)})
        before = None
        for index in shown:
            if before is not None and index > before + 1:
                yield "      ..."
            yield f"  {'>' if index in places else ' '} {self.text.line(self.facts[index].node)}"
            before = index


def _known(fqn: str | None) -> tuple[str, ...]:
    return () if fqn is None else (fqn or "root",)


def index_of(graph: Any) -> GraphIndex:
    """The index of a graph, or of a transformed module's graph.

    Raises:
        TypeError: neither of them was given.
    """
    found = graph if isinstance(graph, (ParallelGraph, GraphIndex)) else getattr(graph, "graph", None)
    if isinstance(found, GraphIndex):
        return found
    if not isinstance(found, ParallelGraph):
        raise TypeError(
            f"expected a ParallelGraph (module.graph, parse_graph(text)) or a transformed module, got "
            f"{type(graph).__name__}"
        )
    return GraphIndex(found)
