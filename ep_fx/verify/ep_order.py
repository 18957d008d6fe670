"""Rule `ep-order`: expert weights are whole before tokens travel, and until tokens are back.

    forward    unshard(experts) < dispatch         combine < reshard           (policy "early": reshard after last use)
    backward   unshard(experts) < combine_backward dispatch_backward < reshard
"""
from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ep_fx.graph.gathers import Gather
from ep_fx.verify.facts import Facts
from ep_fx.verify.regions import Region
from ep_fx.verify.rule import Violation, rule


@rule("ep-order", "expert weights are unsharded before dispatch and (strict) resharded after combine; and so backward")
def ep_order(facts: Facts) -> Iterator[Violation]:
    if not facts.sharded:
        return
    by_parameter: dict[str, list[Gather]] = {}
    for gather in facts.gathers.all:
        if gather.parameter is not None:
            by_parameter.setdefault(gather.parameter.name, []).append(gather)
    for region in facts.regions.all:
        names = region.spec.parameters if region.spec is not None else ()
        gathers = [g for name in names for g in by_parameter.get(name, ())]
        for backward in (False, True):
            yield from _one_direction(facts, region, gathers, backward)


def _one_direction(facts: Facts, region: Region, gathers: list[Gather], backward: bool) -> Iterator[Violation]:
    opening, closing = _stretch(facts, region, backward)
    strict = facts.manifest.expert_reshard == "strict"
    for gather in gathers:
        if opening is not None and facts.is_backward(gather.unshard) is backward:
            yield from _before(facts, gather.unshard, opening, f"{gather.name} is unsharded before rows travel")
        if not strict or closing is None:
            continue
        for reshard in gather.reshards:
            if facts.is_backward(reshard) is backward:
                yield from _before(facts, closing, reshard, f"{gather.name} is resharded after rows are back (strict)")


def _stretch(facts: Facts, region: Region, backward: bool) -> tuple[fx.Node | None, fx.Node | None]:
    """First and last node of a region's communication in one direction; None where it has none."""
    first = region.combine_backward_starts if backward else [region.first]
    last = region.dispatch_backward_ends if backward else region.combine_ends
    place = facts.position.__getitem__
    return min(first, key=place, default=None), max(last, key=place, default=None)


def _before(facts: Facts, first: fx.Node, second: fx.Node, why: str) -> Iterator[Violation]:
    facts.checked += 1
    if facts.position[first] > facts.position[second]:
        yield Violation(
            at=first,
            expected=f"%{first.name} before %{second.name}: {why}",
            got=f"%{second.name} at {facts.position[second]}, %{first.name} at {facts.position[first]}",
            remedy="gather experts before dispatch (combine_backward), free them after combine (dispatch_backward)",
        )
