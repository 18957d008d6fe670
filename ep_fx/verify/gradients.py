"""Rules `reduce-once` and `divisor`: each gradient is summed over the right ranks and divided by the right number.

    dense     summed over replicate, fsdp, ep      divided by the number of data ranks (grad_reduce "mean")
    expert    summed over replicate, fsdp          divided by the SAME number: its ep group's share came with the tokens
    frozen    in no reduction

What is due is computed here from the mesh and the layouts, not read from any node.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from torch import fx

from ep_fx.graph import ParameterSpec, Role, role_of
from ep_fx.graph.zeros import is_zero
from ep_fx.verify.facts import Facts
from ep_fx.verify.reading import arg
from ep_fx.verify.reductions import GradientPath, dims_of, due_dims, is_reduction
from ep_fx.verify.rule import Violation, rule


@rule("reduce-once", "a trainable gradient is summed once over each mesh dimension on which it differs, over no other")
def reduce_once(facts: Facts) -> Iterator[Violation]:
    reached: set[tuple[fx.Node, int | None]] = set()
    summed = _summed_upstream(facts)
    for spec, path in facts.paths:
        facts.checked += 1
        yield from _entry(facts, spec, path, summed)
        reached.update(path.reduces)
        if facts.sharded:
            yield from _dims(facts, spec, path)
            yield from _form(facts, spec, path)
    for role in (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD):
        for node in facts.by_role[role]:
            yield from _no_other(facts, node, reached)


@rule("divisor", "the product of the scales on a gradient's way is the convention's: the number of data ranks, or 1")
def divisor(facts: Facts) -> Iterator[Violation]:
    if not facts.sharded:
        return
    sizes, mean = facts.manifest.mesh.sizes, facts.manifest.grad_reduce == "mean"
    due = math.prod(sizes.get(dim, 1) for dim in ("replicate", "fsdp", "ep")) if mean else 1
    for spec, path in facts.paths:
        facts.checked += 1
        if not math.isclose(path.divisor, due, rel_tol=1e-12):
            yield Violation(
                at=path.scales[0] if path.scales else path.at or facts.output,
                expected=f"the gradient of {spec.name} divided by {due}: grad_reduce {facts.manifest.grad_reduce!r}",
                got=f"divided by {path.divisor:g}",
                remedy="divide by the number of data ranks, experts too; never by the size of the reduced group",
            )


def _dims(facts: Facts, spec: ParameterSpec, path: GradientPath) -> Iterator[Violation]:
    mesh, due = facts.manifest.mesh, due_dims(facts.manifest, spec)
    scattered: list[tuple[str, ...]] = []
    other: list[tuple[str, ...]] = []
    for node, _ in path.reduces:
        dims = dims_of(node, mesh) or ("an unknown group",)
        (scattered if role_of(node) is Role.REDUCE_GRAD else other).append(dims)
    gather = spec.layout.gather_dims
    got = Counter(dim for dims in (*scattered, *other) for dim in dims)
    foreign = [node for node, _ in path.reduces if role_of(node) not in (Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD)]
    if got == Counter(due) and scattered == ([gather] if gather else []) and not foreign:
        yield from _world_sizes(facts, path)
        return
    scatter = f"scattered over {gather}" if gather else "not scattered"
    yield Violation(
        at=foreign[0] if foreign else path.reduces[0][0] if path.reduces else path.at or facts.output,
        expected=f"the gradient of {spec.name} summed once over {due or 'nothing'}, {scatter}",
        got=f"summed over {list(got.elements()) or 'nothing'}, scattered over {scattered or 'nothing'}"
        + (f", by %{foreign[0].name} of another dialect" if foreign else ""),
        remedy="one reduce_grad over the dimensions that the parameter is gathered over, all_reduce_grad over the rest",
    )


def _world_sizes(facts: Facts, path: GradientPath) -> Iterator[Violation]:
    for node, _ in path.reduces:
        size = facts.manifest.mesh.size(*(dims_of(node, facts.manifest.mesh) or ()))
        if role_of(node) is Role.REDUCE_GRAD and arg(node, 1) != size:
            yield Violation(node, f"world size {size}, its group's", f"{arg(node, 1)}", "pass the size of the group")


def _form(facts: Facts, spec: ParameterSpec, path: GradientPath) -> Iterator[Violation]:
    """Cut like the parameter: uneven blocks padded before the sum, unpadded after it."""
    layout = spec.layout
    if not layout.gather_dims:
        return
    cut = [] if layout.is_even else [(layout.shard_dim, list(layout.shard_sizes))]
    got = [(arg(d, 1), list(arg(d, 2))) for d in path.disassembles]
    unpad = [] if len(set(layout.shard_sizes)) == 1 else [layout.shard_dim]
    if got != cut or [arg(u, 1) for u in path.unpads] != unpad:
        yield Violation(
            at=next(iter([*path.disassembles, *path.unpads, path.at or facts.output])),
            expected=f"the gradient of {spec.name} disassembled {cut}, unpadded along {unpad}",
            got=f"disassembled {got}, unpadded along {[arg(u, 1) for u in path.unpads]}",
            remedy="cut the gradient exactly as the parameter is cut",
        )


def _no_other(facts: Facts, node: fx.Node, reached: set[tuple[fx.Node, int | None]]) -> Iterator[Violation]:
    """Every element of a reduction ends in the gradient of a trainable parameter."""
    listed = arg(node, 0)
    for index in range(len(listed) if isinstance(listed, (list, tuple)) else 0):
        facts.checked += 1
        if (node, index) not in reached:
            yield Violation(
                at=node,
                expected="reductions of trainable parameters' gradients only",
                got=f"element {index} of %{node.name} ends in no gradient of the output (a frozen parameter's?)",
                remedy="reduce nothing that is not returned",
            )


# -- entry ---------------------------------------------------------------------------------------------------------
def _summed_upstream(facts: Facts) -> dict[fx.Node, fx.Node]:
    """Backward values that some earlier sum over ranks has gone into (over ``tp`` that is the model's own)."""
    mesh, table = facts.manifest.mesh, facts.table
    sums = [node for node in facts.collectives if is_reduction(node) and dims_of(node, mesh) != ("tp",)]
    origin = [-1] * len(table)
    for index in (table.position[node] for node in sums):
        origin[index] = index if index >= facts.backward_start else -1
    for index in range(facts.backward_start, len(table)):
        for source in table.inputs[index]:
            if origin[source] >= 0:
                origin[index] = origin[source]
                break
    return {table.nodes[i]: table.nodes[first] for i, first in enumerate(origin) if first >= 0}


def _entry(
    facts: Facts, spec: ParameterSpec, path: GradientPath, summed: dict[fx.Node, fx.Node]
) -> Iterator[Violation]:
    """What enters is the gradient itself: computed from a tangent, not reduced before, zero only if it always was."""
    entry = path.entry
    if isinstance(entry, fx.Node) and entry in summed:
        yield Violation(
            at=summed[entry],
            expected=f"the gradient of {spec.name} not summed over ranks before its own reduction",
            got=f"%{summed[entry].name} on its way from the tangents",
            remedy="remove the second reduction",
        )
    if isinstance(entry, fx.Node) and is_zero(entry):
        if spec.name in facts.manifest.zero_gradients:
            return
        got, remedy = f"constant zeros from %{entry.name}", "keep the nodes that compute this gradient"
    elif isinstance(entry, fx.Node) and facts.is_gradient(entry):
        return
    else:
        got = f"%{entry.name}, which depends on no tangent" if isinstance(entry, fx.Node) else repr(entry)
        remedy = "return what backward computes for it"
    at = entry if isinstance(entry, fx.Node) else path.at or facts.output
    yield Violation(at, f"the gradient of {spec.name}, which capture found not to be zero", got, remedy)
