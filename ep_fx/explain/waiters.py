"""Who waits for this exchange: the wait, the first that read its result, and what computes while it travels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import fx

from ep_fx.explain.names import Reason, Subject, UnknownNameError, Where
from ep_fx.explain.table import plain
from ep_fx.graph import Phase, Role, is_collective, role_of
from ep_fx.graph.places import group_argument
from ep_fx.graph.roles import WAIT_OF
from ep_fx.graph.summary import collective_kind, traced_bytes
from ep_fx.graph.texts import group_text, plural
from ep_fx.graph.values import bytes_text

_WAITS = frozenset(WAIT_OF.values())
_SHOWN = 6
_BOOKKEEPING = frozenset({Role.GETITEM, Role.PLACEHOLDER, Role.OUTPUT, Role.RESHARD, *_WAITS})


@dataclass(frozen=True)
class WaitersAnswer:
    """One collective.

    Args:
        node: where it starts.
        kind: ``dispatch``, ``combine``, ``dispatch counts``, ``unshard``, ``reduce_grad``, ...
        subject: MoE region or FSDP unit.
        phase: in which half it is.
        over, ranks: mesh dimensions, and how many ranks that is.
        bytes: the whole of a gather, else what one rank sends, at typical sizes; None where nothing is known.
        formula: the same in rows and sizes, where it depends on them; else empty.
        sizes: for which sizes of the inputs `bytes` is, as a text.
        wait: the node that waits; None where nobody does.
        readers: who reads the result, after the wait, in order.
        between: what computes after it starts and before the wait, in order.
        reasons: the rule that holds them together.
    """

    node: Where
    kind: str
    subject: str | None
    phase: Phase
    over: str
    ranks: int
    bytes: int | None
    formula: str
    sizes: str
    wait: Where | None
    readers: tuple[Where, ...]
    between: tuple[Where, ...]
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, object]:
        """The answer as JSON knows it."""
        return cast("dict[str, object]", plain(self))

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", {bytes_text(self.bytes)} a rank"
        size += f" ({self.formula}, counted on balanced routing{self._sizes})" if self.formula else ""
        lines = [
            f"%{self.node.node} is the {self.kind} of {self.subject or 'no region'} in {self.phase.value}",
            f"  travels   over {self.over} ({plural(self.ranks, 'rank')}){size}",
            f"  waits     {self.wait or 'nobody'}",
            f"  meanwhile {self._meanwhile()}",
        ]
        lines += [f"  read by   {reader}" for reader in self.readers[:_SHOWN]]
        if len(self.readers) > _SHOWN:
            lines.append(f"            and {len(self.readers) - _SHOWN} more")
        return "\n".join([*lines, *(f"  why       {reason}" for reason in self.reasons)]) + "\n"

    @property
    def _sizes(self) -> str:
        return f"; sizes {self.sizes}" if self.sizes else ""

    def _meanwhile(self) -> str:
        if not self.between:
            return "nothing computes: whatever comes next waits"
        first, last = self.between[0], self.between[-1]
        span = str(first) if len(self.between) == 1 else f"{first} .. {last}"
        return f"{plural(len(self.between), 'node')}: {span}"


def waiters_of(subject: Subject, name: str) -> WaitersAnswer:
    """The answer for the collective called `name`, or for the one whose wait has that name.

    Raises:
        UnknownNameError: no such node, or no collective; a region is answered with its exchanges.
    """
    node = _collective(subject, name)
    facts, places, mesh = subject.facts, subject.text.places, subject.graph.manifest.mesh
    wait = next((user for user in node.users if role_of(user) in _WAITS), None)
    group, size = group_argument(node) or "?", traced_bytes(node, places)
    between: list[fx.Node] = []
    if wait is not None:
        between = [n for n in facts.nodes[facts.position[node] + 1 : facts.position[wait]] if _computes(n)]
    readers = sorted(set(_readers(wait)) if wait is not None else (), key=facts.position.__getitem__)
    return WaitersAnswer(
        node=subject.where(node),
        kind=collective_kind(node, places),
        subject=places[node].subject,
        phase=Phase.BACKWARD if facts.is_backward(node) else Phase.FORWARD,
        over=group_text(group, mesh),
        ranks=mesh.size(*(mesh.dims_of(group) or ())),
        bytes=None if size is None else subject.sizes.number(size),
        sizes=subject.sizes_text[0],
        formula="" if size is None or isinstance(size, int) else str(subject.text.symbols.rename(size)),
        wait=None if wait is None else subject.where(wait),
        readers=tuple(map(subject.where, readers)),
        between=tuple(map(subject.where, between)),
        reasons=tuple(_reasons(subject, node, wait)),
    )


def _collective(subject: Subject, name: str) -> fx.Node:
    named, names = name.strip().removeprefix("%"), subject.text.names
    places = subject.text.places
    inside = [n for n in subject.facts.collectives if places[n].subject == named]
    if named not in subject.nodes and inside:
        nodes = ", ".join(f"%{names[n]} ({collective_kind(n, places)})" for n in inside)
        raise UnknownNameError(f"{named!r} has the collectives {nodes}; ask about one of these nodes")
    manifest = subject.graph.manifest
    node = subject.node(name, [*(region.name for region in manifest.regions), *manifest.units])
    if role_of(node) in _WAITS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if is_collective(node):
        return node
    some = ", ".join(f"%{names[n]}" for n in subject.facts.collectives[:_SHOWN]) or "none"
    raise UnknownNameError(f"{subject.where(node)} is no collective, so nobody waits for it; collectives are {some}")


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and role_of(node) not in _BOOKKEEPING and not is_collective(node)


def _readers(wait: fx.Node) -> Iterator[fx.Node]:
    for user in wait.users:
        if role_of(user) in (Role.GETITEM, Role.ASSEMBLE):
            yield from _readers(user)
        elif user.op != "output" and role_of(user) is not Role.RESHARD:
            yield user


def _reasons(subject: Subject, node: fx.Node, wait: fx.Node | None) -> Iterator[Reason]:
    name = subject.text.names[node]
    through = "a wait, and nobody waits" if wait is None else f"%{subject.text.names[wait]} alone"
    here = f"the result of %{name} is used through {through}"
    yield subject.reason("wait", here, (node,) if wait is None else (node, wait))
    context = subject.text.places.context(node)
    if context is not None:
        here = f"its sizes are the splits of %{subject.text.names[context]}, as of every exchange of this run"
        yield subject.reason("pair", here, (node, context))
