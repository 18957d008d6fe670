"""Rule `wait`: every asynchronous collective has one wait, and its result is read through that wait only.

    unshard           -> unshard_wait          all_to_all_single -> wait_tensor
    reduce_grad, all_reduce_grad -> reduce_grad_wait
"""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ep_fx.graph import Role, is_collective, role_of
from ep_fx.graph.roles import WAIT_OF
from ep_fx.verify.facts import Facts
from ep_fx.verify.reading import names
from ep_fx.verify.rule import Violation, rule

_WAITS = frozenset(WAIT_OF.values())


@rule("wait", "every asynchronous collective has one wait, through which alone its result is used")
def wait(facts: Facts) -> Iterator[Violation]:
    for node in facts.collectives:
        facts.checked += 1
        yield from _one_wait(node)
    for role in _WAITS:
        for node in facts.by_role[role]:
            facts.checked += 1
            yield from _of_a_collective(node)


def _one_wait(start: fx.Node) -> Iterator[Violation]:
    kind = WAIT_OF.get(role_of(start), Role.WAIT)
    for result in _results(start):
        waits = [user for user in result.users if role_of(user) is kind]
        others = [user for user in result.users if role_of(user) is not kind]
        if len(waits) != 1:
            got = f"waited for by {names(waits)}" if waits else "no wait: the result is never safe to read"
            yield Violation(start, f"one {kind.value} of %{result.name}", got, "wait once, before the first use")
        if others:
            yield Violation(
                at=others[0],
                expected=f"%{result.name} used through its wait ({names(waits)})",
                got=f"%{others[0].name} reads it while it may still be in flight",
                remedy="read what the wait returns",
            )


def _results(start: fx.Node) -> list[fx.Node]:
    """The values to wait for: the node, or the elements of a list that torch's own collectives return."""
    if role_of(start) in WAIT_OF:
        return [start]
    elements = [user for user in start.users if role_of(user) is Role.GETITEM]
    return elements if elements and len(elements) == len(start.users) else [start]


def _of_a_collective(node: fx.Node) -> Iterator[Violation]:
    start = node.args[0] if node.args else None
    if isinstance(start, fx.Node) and role_of(start) is Role.GETITEM:
        source = start.args[0]
        start = source if isinstance(source, fx.Node) and role_of(source) not in WAIT_OF else start
    if isinstance(start, fx.Node) and is_collective(start) and WAIT_OF.get(role_of(start), Role.WAIT) is role_of(node):
        return
    got = f"%{start.name}, which starts none" if isinstance(start, fx.Node) else f"{start!r}"
    yield Violation(node, "a collective of its own kind to wait for", got, "wait for collectives only")
