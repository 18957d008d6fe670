"""Rule `order`: the list of nodes is a valid program, for data and for memory."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

import networkx as nx
from torch import fx

from ep_fx.graph import Phase, Role, info_of
from ep_fx.graph.effects import effect_edges
from ep_fx.graph.info import phases_of
from ep_fx.verify.facts import Facts
from ep_fx.verify.report import node_text
from ep_fx.verify.rule import Violation, rule


@rule("order", "the node list is a linear extension of data edges and effect edges; forward comes before backward")
def order(facts: Facts) -> Iterator[Violation]:
    yield from _data(facts)
    yield from _effects(facts)
    yield from _frame(facts)
    if facts.manifest.tangents:
        yield from _halves(facts)


def _data(facts: Facts) -> Iterator[Violation]:
    position, output = facts.position, facts.output
    for source, node in facts.misplaced:
        yield Violation(
            at=node,
            expected=f"%{source.name} in the list before %{node.name}, which reads it",
            got=_cycle(facts, source, node) if source in position else f"%{source.name} is gone, or of another graph",
            remedy="move the reader behind its arguments",
        )
    facts.checked += len(position)
    if facts.nodes[-1] is not output:
        yield Violation(output, "the output as last node", f"{node_text(facts.nodes[-1])} follows it", "move it up")


def _effects(facts: Facts) -> Iterator[Violation]:
    position = facts.position
    for edge in effect_edges(facts.graph, facts.aliases, facts.gathers):
        facts.checked += 1
        if position[edge.before] > position[edge.after]:
            yield Violation(
                at=edge.before,
                expected=f"%{edge.before.name} before %{edge.after.name}: {edge.reason}",
                got=_cycle(facts, edge.before, edge.after),
                remedy=f"move %{edge.after.name} behind %{edge.before.name}",
            )


def _cycle(facts: Facts, before: fx.Node, after: fx.Node) -> str:
    """The path that makes the edge `before` -> `after` unfulfillable, or that it is merely out of order."""
    links = nx.DiGraph((source, node) for node in facts.nodes for source in node.all_input_nodes)
    links.add_edges_from((e.before, e.after) for e in effect_edges(facts.graph, facts.aliases, facts.gathers))
    if before in links and after in links and nx.has_path(links, after, before):
        path = [before, *nx.shortest_path(links, after, before)]
        return "a cycle, so no order is valid: " + " -> ".join(f"%{node.name}" for node in path)
    return f"%{before.name} at {facts.position[before]}, %{after.name} at {facts.position[after]}"


def _frame(facts: Facts) -> Iterator[Violation]:
    """Placeholders come first, in the order of the Manifest."""
    manifest = facts.manifest
    expected = [p.placeholder for p in manifest.parameters] + [b.placeholder for b in manifest.buffers]
    expected += [*manifest.inputs, *manifest.tangents]
    found = facts.by_role[Role.PLACEHOLDER]
    facts.checked += len(found)
    if [node.target for node in found] != expected:
        wrong = next((n for n, name in zip(found, expected, strict=False) if n.target != name), facts.nodes[0])
        yield Violation(
            at=wrong,
            expected=f"the {len(expected)} placeholders of the Manifest: parameters, buffers, inputs, tangents",
            got=f"{len(found)} placeholders, the first difference at %{wrong.name}",
            remedy="leave placeholders as capture made them",
        )
    late = next((n for n in found if facts.position[n] >= len(found)), None)
    if late is not None:
        yield Violation(late, "placeholders before all other nodes", f"%{late.name} is further down", "move it up")


def _halves(facts: Facts) -> Iterator[Violation]:
    """What reads a gradient stands behind all of forward, and so do the labels by which the graph is split."""
    earliest, latest = facts.boundary
    kinds = facts.table.kinds
    gradients = (i for i in compress(range(earliest), facts.dependents) if kinds[i].role is not Role.PLACEHOLDER)
    early = next((facts.nodes[i] for i in gradients), None)
    facts.checked += len(facts.nodes)
    if early is not None:
        yield Violation(
            at=early,
            expected=f"forward nodes only, up to %{facts.nodes[earliest - 1].name}, which an output needs",
            got=f"%{early.name} depends on a tangent",
            remedy="move it behind forward",
        )
    calls = [node for node, kind in zip(facts.nodes, kinds, strict=True) if kind.target is not None]
    labels = [phase is Phase.BACKWARD for phase in phases_of(calls)]
    first = labels.index(True) if True in labels else len(calls)
    wrong = calls[labels.index(False, first)] if False in labels[first:] else None
    cut = facts.position[calls[first]] if first < len(calls) else len(facts.nodes) - 1
    if wrong is None and not earliest <= cut <= latest:
        wrong = facts.nodes[min(cut, latest)]
    if wrong is not None:
        yield Violation(
            at=wrong,
            expected=f"labels that turn from forward to backward once, between {earliest} and {latest}",
            got=f"labels turn at {cut}; %{wrong.name} is labelled {info_of(wrong).phase.value}",
            remedy="give nodes the phase of the half in which they stand: the graph is split by it",
        )
