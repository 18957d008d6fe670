"""Why is this gather here: what it gathers, who reads it first, when it is freed, and the rules that put it there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import fx

from ep_fx.explain.names import Reason, Subject, UnknownNameError, Where
from ep_fx.explain.table import plain
from ep_fx.graph import Phase, Role, role_of
from ep_fx.graph.gathers import Gather
from ep_fx.graph.places import group_argument
from ep_fx.graph.texts import group_text, plural
from ep_fx.graph.values import bytes_text
from ep_fx.verify.regions import Region


@dataclass(frozen=True)
class GatherAnswer:
    """One gather.

    Args:
        node: the unshard.
        phase: in which half it is.
        unit: FSDP unit.
        parameters: the bytes on one rank of each parameter that it makes whole.
        over, ranks: mesh dimensions, and how many ranks that is.
        wait: who waits for it; None for a graph where nobody does.
        first, last: the first and the last node that reads what it gathered; None where nobody does.
        readers: how many read it.
        freed: who frees it; None where it stays.
        reasons: the rules that would break if it were not there, earlier or later.
    """

    node: Where
    phase: Phase
    unit: str
    parameters: dict[str, int]
    over: str
    ranks: int
    wait: Where | None
    first: Where | None
    last: Where | None
    readers: int
    freed: Where | None
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, object]:
        """The answer as JSON knows it."""
        return cast("dict[str, object]", plain(self))

    def __str__(self) -> str:
        size = bytes_text(sum(self.parameters.values()))
        lines = [
            f"%{self.node.node} gathers unit {self.unit} in {self.phase.value}",
            f"  gathered  {plural(len(self.parameters), 'parameter')}, {size} on each rank, over {self.over} "
            f"({plural(self.ranks, 'rank')}): {', '.join(self.parameters)}",
            f"  arrives   {self.wait or 'nobody waits for it'}",
            f"  read by   {self.first or 'nobody'}" + (f", the first of {self.readers}" if self.readers > 1 else ""),
            f"  last      {self.last or '-'}",
            f"  freed by  {self.freed or 'nobody: it stays until the step ends'}",
        ]
        return "\n".join([*lines, *(f"  why       {reason}" for reason in self.reasons)]) + "\n"


def why_gather(subject: Subject, name: str) -> GatherAnswer:
    """The answer for the gather called `name`, or for the gather whose value a node of that name is.

    Raises:
        UnknownNameError: no such node, or one that is no gather; a parameter or a unit is answered with its gathers.
    """
    unshard = _unshard(subject, name)
    gathers = subject.facts.gathers.of_unshard[unshard]
    position = subject.facts.position
    readers = sorted({reader for g in gathers for reader in g.readers}, key=position.__getitem__)
    frees = sorted({free for g in gathers for free in g.reshards}, key=position.__getitem__)
    waits = [wait for g in gathers for wait in g.waits]
    group = group_argument(unshard) or "?"
    mesh = subject.graph.manifest.mesh
    backward = subject.facts.is_backward(unshard)
    return GatherAnswer(
        node=subject.where(unshard),
        phase=Phase.BACKWARD if backward else Phase.FORWARD,
        unit=subject.text.places.unit(unshard) or "of no parameter",
        parameters={g.name: g.parameter.full_bytes if g.parameter else 0 for g in gathers},
        over=group_text(group, mesh),
        ranks=mesh.size(*(mesh.dims_of(group) or ())),
        wait=subject.where(waits[0]) if waits else None,
        first=subject.where(readers[0]) if readers else None,
        last=subject.where(readers[-1]) if readers else None,
        readers=len(readers),
        freed=subject.where(frees[-1]) if frees else None,
        reasons=tuple(_reasons(subject, unshard, gathers, readers)),
    )


def _unshard(subject: Subject, name: str) -> fx.Node:
    manifest, facts = subject.graph.manifest, subject.facts
    named = name.strip().removeprefix("%")
    wanted = {p.name for p in manifest.parameters if named in (p.name, p.unit)}
    if named not in subject.nodes and wanted:
        found = [n for n, gs in facts.gathers.of_unshard.items() if any(g.name in wanted for g in gs)]
        nodes = ", ".join(f"%{subject.text.names[n]} ({facts.direction(n)})" for n in found) or "no node"
        raise UnknownNameError(f"{named!r} is gathered by {nodes}; ask about one of these nodes")
    node = subject.node(name, [*manifest.units, *manifest.names])
    if role_of(node) is Role.UNSHARD:
        return node
    owners = facts.gathers.holders.get(node, ())
    if owners and role_of(node) in (Role.UNSHARD_WAIT, Role.GETITEM, Role.ASSEMBLE):
        return owners[0].unshard
    place = subject.text.places[node]
    about = place.action.value if place.subject is None else f"{place.action.value} of {place.subject}"
    gathers = [subject.text.names[n] for n in facts.gathers.of_unshard][:5]
    raise UnknownNameError(
        f"{subject.where(node)} is no gather but {about}; gathers are {', '.join(f'%{g}' for g in gathers) or 'none'}"
    )


def _reasons(subject: Subject, unshard: fx.Node, gathers: list[Gather], readers: list[fx.Node]) -> Iterator[Reason]:
    facts, names = subject.facts, subject.text.names
    about = {unshard, *readers, *(reshard for g in gathers for reshard in g.reshards)}
    if readers:
        owner = next(g for g in gathers if readers[0] in g.readers)
        here = f"%{names[readers[0]]} reads {owner.name}, of which this rank holds a shard only"
        yield subject.reason("live", here, about)
    if facts.is_backward(unshard) and (freed := _freed_in_forward(subject, gathers)) is not None:
        yield subject.reason(
            "once",
            f"forward freed the unit at %{names[freed]} (reshard_after_forward=true), and each direction that uses a "
            "parameter gathers it once",
            about,
        )
    for region in _regions(subject, gathers):
        start = _starts(subject, region, facts.is_backward(unshard))
        if start is not None:
            yield subject.reason(
                "ep-order",
                f"experts are whole before the rows of {region.name} travel at %{names[start]}; later would hold up "
                "ranks that wait for rows",
                about,
            )
    depth = facts.manifest.prefetch_depth
    ahead = f"at most {plural(depth, 'unit')}" if depth else "no unit"
    yield subject.reason("peak", f"not earlier: {ahead} may be gathered ahead of the first use", about)


def _freed_in_forward(subject: Subject, gathers: list[Gather]) -> fx.Node | None:
    names = {g.name for g in gathers}
    for gather in subject.facts.gathers.all:
        if gather.name in names and not subject.facts.is_backward(gather.unshard):
            for reshard in gather.reshards:
                if not subject.facts.is_backward(reshard):
                    return reshard
    return None


def _regions(subject: Subject, gathers: list[Gather]) -> list[Region]:
    names = {g.name for g in gathers}
    regions = subject.facts.regions.all
    return [r for r in regions if r.spec is not None and names & set(r.spec.parameters)]


def _starts(subject: Subject, region: Region, backward: bool) -> fx.Node | None:
    starts = region.combine_backward_starts if backward else [region.first]
    return min(starts, key=subject.facts.position.__getitem__, default=None)
