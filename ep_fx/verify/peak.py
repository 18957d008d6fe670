"""Rule `peak`: no unit is gathered ahead of its use, but for the prefetch depth that the Manifest allows.

    fine       unshard(A) wait(A) use(A) ... unshard(B) wait(B) use(B)
    broken     unshard(A) unshard(B) unshard(C) wait.. use(A) ... use(B) ... use(C)

Numbers stay right when every gather is hoisted to the top; memory does not. Between its unshard and its first use a
unit is *ahead*; at no node that computes may more than `prefetch_depth` units be ahead. One walk, O(nodes + readers).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ep_fx.graph import Role, role_of
from ep_fx.graph.gathers import Gather
from ep_fx.verify.facts import Facts
from ep_fx.verify.rule import Violation, rule

_NO_COMPUTE = frozenset(
    {
        Role.PLACEHOLDER,
        Role.PAD_SHARD,
        Role.UNSHARD,
        Role.UNSHARD_WAIT,
        Role.ASSEMBLE,
        Role.GETITEM,
        Role.RESHARD,
        Role.REDUCE_GRAD,
    }
)
"""Roles of nodes between which a gather may stand without being early."""


@rule("peak", "no more units than the prefetch depth are gathered ahead of their first use")
def peak(facts: Facts) -> Iterator[Violation]:
    depth = facts.manifest.prefetch_depth
    opening = _openings(facts)
    changes: dict[int, list[tuple[int, fx.Node]]] = {}
    for unshard, gathers in facts.gathers.of_unshard.items():
        first = _first_use(facts, gathers, opening)
        if first is not None:
            facts.checked += 1
            changes.setdefault(facts.position[unshard], []).append((1, unshard))
            changes.setdefault(first, []).append((-1, unshard))
    ahead: dict[fx.Node, None] = {}
    reported: set[fx.Node] = set()
    for index in sorted(set(changes) | {i + 1 for i in changes}):
        for sign, unshard in changes.get(index, ()):
            if sign > 0:
                ahead[unshard] = None
            else:
                ahead.pop(unshard, None)
        if len(ahead) <= depth:
            continue
        culprit = _computed_meanwhile(facts, index, changes)
        late = next(reversed(ahead))
        if culprit is not None and late not in reported:
            reported.add(late)
            yield _too_early(facts, late, culprit, list(ahead))


def _openings(facts: Facts) -> dict[str, list[int]]:
    """Where the rows of an expert parameter's regions begin to travel, forward and backward: a use like any other."""
    found: dict[str, list[int]] = {}
    for region in facts.regions.all:
        starts = [region.first, *region.combine_backward_starts]
        for name in region.spec.parameters if region.spec is not None else ():
            found.setdefault(name, []).extend(facts.position[node] for node in starts if node is not None)
    return found


def _first_use(facts: Facts, gathers: list[Gather], opening: dict[str, list[int]]) -> int | None:
    """Position of the first thing after the unshard that needs any of the values."""
    start = facts.position[gathers[0].unshard] if gathers else 0
    readers = [facts.position[reader] for gather in gathers for reader in gather.readers]
    travel = [at for gather in gathers if gather.parameter for at in opening.get(gather.parameter.name, ())]
    return min((at for at in (*readers, *travel) if at > start), default=None)


def _computed_meanwhile(facts: Facts, index: int, changes: dict[int, list[tuple[int, fx.Node]]]) -> fx.Node | None:
    """The first node from `index` on that computes, before anything about the gathers changes again."""
    for place in range(index, len(facts.nodes)):
        if place > index and place in changes:
            return None
        node = facts.nodes[place]
        if node.op == "call_function" and role_of(node) not in _NO_COMPUTE:
            return node
    return None


def _too_early(facts: Facts, unshard: fx.Node, culprit: fx.Node, ahead: list[fx.Node]) -> Violation:
    names = ", ".join(f"%{node.name}" for node in ahead)
    return Violation(
        at=unshard,
        expected=f"at most {facts.manifest.prefetch_depth} units gathered ahead of their use",
        got=f"{names} while %{culprit.name} computes",
        remedy="move the unshard down to its first use, or raise the prefetch depth",
    )
