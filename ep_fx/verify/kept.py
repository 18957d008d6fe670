"""Part of rule `once`: a gathered unit is freed as soon as nobody needs it any more.

    fine       mm(x, w) reshard(w) relu(..)            broken     mm(x, w) relu(..) reshard(w)

Nothing that computes stands between the last need and the reshard. Experts are needed until their rows are back, where
the policy is strict. One walk, O(nodes + readers).
"""
from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from torch import fx

from ep_fx.graph import Role
from ep_fx.graph.gathers import Gather
from ep_fx.verify.facts import Facts
from ep_fx.verify.rule import Violation

_NO_COMPUTE = frozenset(
    {
        Role.PLACEHOLDER, Role.OUTPUT, Role.PAD_SHARD, Role.UNSHARD, Role.UNSHARD_WAIT, Role.ASSEMBLE, Role.GETITEM,
        Role.RESHARD, Role.DISASSEMBLE, Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.REDUCE_GRAD_WAIT, Role.SCALE_GRAD,
        Role.UNPAD_SHARD,
    }
)


def kept_too_long(facts: Facts) -> Iterator[Violation]:
    """The reshards that come later than the last need of all that they free."""
    freed: dict[fx.Node, list[Gather]] = {}
    for gather in facts.gathers.all:
        for reshard in gather.reshards:
            freed.setdefault(reshard, []).append(gather)
    if not freed:
        return
    computes = [kind.target is not None and kind.role not in _NO_COMPUTE for kind in facts.table.kinds]
    before = [0, *accumulate(computes)]
    closing = _closings(facts)
    for reshard, gathers in freed.items():
        here = facts.position[reshard]
        last = max((at for g in gathers for at in _needs(facts, g, closing) if at < here), default=None)
        if last is None or before[here] == before[last + 1]:
            continue
        culprit = next(i for i in range(last + 1, here) if computes[i])
        yield Violation(
            at=reshard,
            expected=f"{', '.join(g.name for g in gathers)} freed after %{facts.nodes[last].name}, the last to need it",
            got=f"%{facts.nodes[culprit].name} computes while it is kept",
            remedy="reshard right after the last use, experts (strict) right after their rows are back",
        )


def _needs(facts: Facts, gather: Gather, closing: dict[str, list[int]]) -> Iterator[int]:
    yield from (facts.position[node] for node in (*gather.readers, *gather.waits, *gather.assembled))
    if gather.parameter is not None:
        yield from closing.get(gather.parameter.name, ())


def _closings(facts: Facts) -> dict[str, list[int]]:
    """Where the rows of an expert parameter's regions are back, in forward and in backward."""
    found: dict[str, list[int]] = {}
    if facts.manifest.expert_reshard != "strict":
        return found
    for region in facts.regions.all:
        ends = [facts.position[node] for node in (*region.combine_ends, *region.dispatch_backward_ends)]
        for name in region.spec.parameters if region.spec is not None else ():
            found.setdefault(name, []).extend(ends)
    return found
