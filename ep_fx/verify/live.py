"""Rules `live`, `once`, `saved`: when a gathered parameter exists, how often, and for how long.

    live    unshard_wait .. every reader, through any alias .. reshard
    once    one gather and one reshard of a parameter in each direction that uses it
    saved   nothing gathered goes from forward to backward, unless the policy keeps it
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ep_fx.graph import Layout, Role, role_of
from ep_fx.graph.gathers import Gather
from ep_fx.verify.facts import Facts
from ep_fx.verify.kept import kept_too_long
from ep_fx.verify.reading import arg, names
from ep_fx.verify.rule import Violation, rule


@rule("live", "every use of an unsharded value, through any alias, lies between its unshard and its reshard")
def live(facts: Facts) -> Iterator[Violation]:
    for gather in facts.gathers.all:
        facts.checked += len(gather.readers)
        yield from _readers(facts, gather, gather.readers, gather.reshards)
        if gather.block_reshards:
            yield from _readers(facts, gather, gather.block_readers, gather.block_reshards)
    for reshard, value in facts.gathers.stray_reshards:
        yield Violation(
            at=reshard,
            expected="reshard frees values that an unshard made",
            got=f"%{value.name} is no unsharded value; freeing it would destroy it",
            remedy="reshard what unshard_wait (or assemble) gives",
        )
    if facts.sharded:
        yield from _raw_uses(facts)


def _readers(
    facts: Facts, gather: Gather, readers: list[fx.Node], reshards: list[fx.Node]
) -> Iterator[Violation]:
    position = facts.position
    wait = min((position[w] for w in gather.waits), default=position[gather.unshard])
    free = min((position[r] for r in reshards), default=len(facts.nodes))
    for reader in readers:
        if reader is facts.output:
            yield Violation(
                at=reader,
                expected="outputs with memory of their own",
                got=f"the graph returns {gather.name} as gathered by %{gather.unshard.name}, or a view of it",
                remedy="return a copy",
            )
        elif position[reader] > free:
            yield Violation(
                at=reader,
                expected=f"no use of {gather.name} after %{facts.nodes[free].name} frees it",
                got=f"%{reader.name} reads it through {_path(facts, gather, reader)}",
                remedy="unshard again before this use, or move the reshard behind it",
            )
        elif position[reader] < wait:
            yield Violation(
                at=reader,
                expected=f"no use of {gather.name} before %{facts.nodes[wait].name} has it",
                got=f"%{reader.name} reads it through {_path(facts, gather, reader)}",
                remedy="move the use behind the wait",
            )


def _path(facts: Facts, gather: Gather, reader: fx.Node) -> str:
    """``%full -> %t -> %view``: the aliases by which `reader` comes to the value."""
    path: list[fx.Node] = []
    node: fx.Node | None = reader
    while node is not None:
        node = next((i for i in node.all_input_nodes if gather in facts.gathers.holders.get(i, ())), None)
        if node is None or role_of(node) is Role.UNSHARD_WAIT:
            break
        path.append(node)
    return " -> ".join(f"%{n.name}" for n in reversed(path))


def _raw_uses(facts: Facts) -> Iterator[Violation]:
    """The placeholder of a sharded parameter is a shard: only a gather may read it."""
    gathering = (Role.PAD_SHARD, Role.UNSHARD)
    for placeholder, spec in facts.placeholders.items():
        if not spec.layout.gather_dims:
            continue
        facts.checked += 1
        pads = [u for u in placeholder.users if role_of(u) is Role.PAD_SHARD]
        users = [*placeholder.users, *(u for pad in pads for u in pad.users)]
        for user in users:
            if role_of(user) in gathering or _takes_its_shape(user, placeholder):
                continue
            yield Violation(
                at=user,
                expected=f"{spec.name} is read through unshard: its placeholder holds this rank's shard only",
                got=f"%{user.name} reads the shard itself",
                remedy="gather the parameter before this use",
            )


def _takes_its_shape(user: fx.Node, placeholder: fx.Node) -> bool:
    """`unpad_shard` may name the shard that its result is to look like."""
    return role_of(user) is Role.UNPAD_SHARD and arg(user, 0) is not placeholder


@rule("once", "a parameter is unsharded once in each direction that uses it, and resharded once after its last use")
def once(facts: Facts) -> Iterator[Violation]:
    if not facts.sharded:
        return
    gathered: dict[tuple[str, str], Gather] = {}
    units: dict[tuple[Any, ...], fx.Node] = {}
    for gather in facts.gathers.all:
        facts.checked += 1
        yield from _source(facts, gather)
        spec = gather.parameter
        if spec is None:
            continue
        direction = facts.direction(gather.unshard) if facts.manifest.reshard_after_forward else "the step"
        if (first := gathered.setdefault((spec.name, direction), gather)) is not gather:
            yield _twice(gather.unshard, f"{spec.name} gathered once in {direction}", first.unshard)
        one = (spec.unit, direction, spec.layout.gather_dims, spec.dtype)
        if (unit := units.setdefault(one, gather.unshard)) is not gather.unshard and first is gather:
            yield _twice(gather.unshard, f"unit {spec.unit!r} gathered by one unshard in {direction}", unit)
        yield from _form(facts, gather, spec.layout)
        yield from _freed(facts, gather)
        if facts.manifest.reshard_after_forward:
            yield from _own_direction(facts, gather, direction)
    yield from kept_too_long(facts)
    for unshard in facts.gathers.of_unshard:
        yield from _group(facts, unshard)


def _twice(at: fx.Node, expected: str, first: fx.Node) -> Violation:
    return Violation(at, expected, f"%{first.name} and %{at.name}", "use the first gather, or free it before")


def _source(facts: Facts, gather: Gather) -> Iterator[Violation]:
    """Every element of an unshard is a parameter's own shard, padded where cuts are uneven."""
    spec = gather.parameter
    if spec is None or not spec.layout.gather_dims:
        yield Violation(
            at=gather.unshard,
            expected=f"the placeholder of a sharded parameter as element {gather.index}",
            got=f"%{gather.shard.name}" if gather.shard is not None else "no node",
            remedy="unshard parameters only, and only those whose layout names dimensions to gather",
        )
        return
    layout = spec.layout
    wanted = (layout.shard_dim, layout.padded_size) if len(set(layout.shard_sizes)) > 1 else None
    got = (arg(gather.pad, 1), arg(gather.pad, 2)) if gather.pad is not None else None
    if got != wanted:
        yield Violation(
            at=gather.pad or gather.unshard,
            expected=f"{spec.name} " + (f"padded to (dim, size) = {wanted}" if wanted else "gathered unpadded"),
            got=f"pad_shard with {got}" if got else "no pad_shard",
            remedy="pad uneven shards to the largest one, and only those",
        )


def _form(facts: Facts, gather: Gather, layout: Layout) -> Iterator[Violation]:
    """Cuts other than equal ones along dim 0 are put together by one assemble, and read from there only."""
    if layout.is_even and not gather.assembled:
        return
    assembled = gather.assembled
    wanted = (layout.shard_dim, list(layout.shard_sizes))
    wrong = [a for a in assembled if (arg(a, 1), list(arg(a, 2))) != wanted]
    bare = [r for r in gather.block_readers if role_of(r) is not Role.ASSEMBLE]
    if layout.is_even or len(assembled) > 1 or wrong or bare:
        yield Violation(
            at=next(iter([*wrong, *bare, *assembled[1:], gather.unshard])),
            expected=f"{gather.name} " + ("read as gathered" if layout.is_even else f"assembled once, {wanted}"),
            got=f"assemble: {names(assembled)}; readers of the gathered blocks: {names(bare)}",
            remedy="assemble uneven cuts once, with the Manifest's sizes; even ones not at all",
        )


def _freed(facts: Facts, gather: Gather) -> Iterator[Violation]:
    if len(gather.reshards) == 1:
        return
    got = f"resharded by {names(gather.reshards)}" if gather.reshards else "it is never freed: a leak"
    yield Violation(
        at=gather.reshards[1] if gather.reshards else gather.unshard,
        expected=f"one reshard of {gather.name} after %{gather.unshard.name}",
        got=got,
        remedy="reshard each gathered parameter once, after its last use in this direction",
    )


def _own_direction(facts: Facts, gather: Gather, direction: str) -> Iterator[Violation]:
    """Gathered, read and freed in one half of the graph."""
    used = [n for n in (*gather.readers, *gather.reshards) if n is not facts.output]
    foreign = [n for n in used if facts.direction(n) != direction]
    if foreign:
        yield Violation(
            at=foreign[0],
            expected=f"{gather.name} gathered in {facts.direction(foreign[0])} for its uses there",
            got=f"%{foreign[0].name} uses what %{gather.unshard.name} gathered in {direction}",
            remedy="reshard at the end of each direction, unshard again in the other",
        )


def _group(facts: Facts, unshard: fx.Node) -> Iterator[Violation]:
    mesh, seen = facts.manifest.mesh, set[tuple[str, ...]]()
    for gather in facts.gathers.of_unshard[unshard]:
        dims = gather.parameter.layout.gather_dims if gather.parameter else ()
        if not dims or dims in seen:
            continue
        seen.add(dims)
        wanted = (mesh.size(*dims), mesh.groups.get(mesh.live(dims)))
        if (arg(unshard, 1), arg(unshard, 2)) != wanted:
            yield Violation(
                at=unshard,
                expected=f"{gather.name} gathered over {dims}: world size and group {wanted}",
                got=f"{(arg(unshard, 1), arg(unshard, 2))}, which is {mesh.dims_of(str(arg(unshard, 2)))}",
                remedy="gather over the dimensions of the parameter's layout",
            )
            return


@rule("saved", "no value kept for backward holds an unsharded parameter or a view of one, unless the policy keeps it")
def saved(facts: Facts) -> Iterator[Violation]:
    if not facts.manifest.reshard_after_forward:
        return
    start, position = facts.backward_start, facts.position
    for node, gathers in facts.gathers.holders.items():
        if position[node] >= start:
            break
        facts.checked += 1
        later = next((u for u in node.users if position[u] >= start and u is not facts.output), None)
        if later is not None:
            yield Violation(
                at=later,
                expected="backward reads forward values that hold no gathered memory",
                got=f"it reads %{node.name}, which keeps {', '.join(_names(gathers))} alive from forward to backward",
                remedy="compute the view again from a gather in backward",
            )


def _names(gathers: tuple[Gather, ...]) -> list[str]:
    return [gather.name for gather in gathers]


