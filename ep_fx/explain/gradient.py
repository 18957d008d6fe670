"""Which reductions does this gradient meet, and what is its divisor: the way of one gradient, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import fx

from ep_fx.explain.names import Reason, Subject, UnknownNameError, Where, lookup
from ep_fx.explain.table import plain
from ep_fx.graph import ParameterSpec, Role, role_of
from ep_fx.graph.texts import plural
from ep_fx.verify.reading import arg
from ep_fx.verify.reductions import dims_of, due_dims, gradient_path

_SHOWN = 5
_WORDS = {Role.REDUCE_GRAD: "reduce-scatter", Role.ALL_REDUCE_GRAD: "all-reduce"}


@dataclass(frozen=True)
class GradientStep:
    """One sum over ranks, or one scale.

    Args:
        node: the node that does it.
        word: ``reduce-scatter``, ``all-reduce`` or ``divide``.
        over: mesh dimensions of a sum.
        ranks: ranks of a sum.
        divisor: of a scale; 1 for a sum.
    """

    node: Where
    word: str
    over: tuple[str, ...]
    ranks: int
    divisor: float

    def __str__(self) -> str:
        if self.word == "divide":
            return f"divided by {self.divisor:g} at {self.node}"
        return f"{self.word} over {','.join(self.over)} ({plural(self.ranks, 'rank')}) at {self.node}"


@dataclass(frozen=True)
class GradientAnswer:
    """One gradient.

    Args:
        parameter, unit: whose it is.
        expert: whether it is an expert's, whose gradient comes from all ranks of ``ep`` through the tokens already.
        computed: the node that computes this rank's contribution; None for a gradient that is zero by construction.
        steps: every sum over ranks and every scale, in the order in which they run.
        due: mesh dimensions over which contributions differ.
        inside: mesh dimensions that the exchange of tokens has summed over.
        divisor: of all scales together.
        due_divisor: what the convention asks for.
        reasons: the rules that hold this.
    """

    parameter: str
    unit: str
    expert: bool
    computed: Where | None
    steps: tuple[GradientStep, ...]
    due: tuple[str, ...]
    inside: tuple[str, ...]
    divisor: float
    due_divisor: float
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, object]:
        """The answer as JSON knows it."""
        return cast("dict[str, object]", plain(self))

    def __str__(self) -> str:
        kind = "expert" if self.expert else "dense"
        whole = "of its own experts" if self.expert and self.inside else "of the parameter"
        differ = ", ".join(self.due) or f"no dimension: every rank computes the whole gradient {whole}"
        inside = f"; the exchange of tokens has summed over {', '.join(self.inside)}" if self.inside else ""
        lines = [
            f"the gradient of {self.parameter} ({kind}, unit {self.unit})",
            f"  computed  {self.computed or 'nowhere: zeros, no output depends on the parameter'}",
            f"  differs   over {differ}{inside}",
            *(f"  step      {step}" for step in self.steps),
            f"  divisor   {self.divisor:g}, due {self.due_divisor:g}",
        ]
        return "\n".join([*lines, *(f"  why       {reason}" for reason in self.reasons)]) + "\n"


def gradient_of(subject: Subject, name: str) -> GradientAnswer:
    """The answer for the parameter called `name`, or whose name ends in ``.`` and `name`, or ``%p6`` in the text form.

    Raises:
        UnknownNameError: no such parameter, several that end so, or one that is not trained here.
    """
    manifest = subject.graph.manifest
    node = subject.nodes.get(name.strip().removeprefix("%"))
    printed = None if node is None or name in manifest.names else subject.graph.parameter_nodes().get(node)
    spec = printed or _parameter(manifest.names, name)
    name = spec.name
    if not spec.trainable:
        raise UnknownNameError(f"parameter {name!r} is frozen, or the graph has no backward: it has no gradient here")
    due = due_dims(manifest, spec)
    path = gradient_path(subject.graph.gradients[name], due=bool(due))
    nodes = {node for node, _ in path.reduces} | set(path.scales)
    order = sorted(nodes, key=subject.facts.position.__getitem__)
    computed = path.entry if isinstance(path.entry, fx.Node) and name not in manifest.zero_gradients else None
    if computed is not None and role_of(computed) is Role.GETITEM:
        computed = cast(fx.Node, computed.args[0])
    return GradientAnswer(
        parameter=name,
        unit=spec.unit,
        expert=spec.layout.is_expert,
        computed=None if computed is None else subject.where(computed),
        steps=tuple(_step(subject, node) for node in order),
        due=due,
        inside=manifest.mesh.live(("ep",)) if spec.layout.is_expert else (),
        divisor=path.divisor,
        due_divisor=manifest.grad_divisor,
        reasons=tuple(_reasons(subject, spec, due, order)),
    )


def _parameter(known: Mapping[str, ParameterSpec], name: str) -> ParameterSpec:
    ends = [full for full in known if full.endswith(f".{name}")]
    if name in known or not ends:
        return lookup(name, known, "parameter")
    if len(ends) == 1:
        return known[ends[0]]
    shown = ", ".join(ends[:_SHOWN]) + (f" and {len(ends) - _SHOWN} more" if len(ends) > _SHOWN else "")
    raise UnknownNameError(f"{name!r} is the end of several parameters' names: {shown}; ask about one of them")


def _step(subject: Subject, node: fx.Node) -> GradientStep:
    mesh = subject.graph.manifest.mesh
    over = dims_of(node, mesh)
    if over is not None:
        return GradientStep(subject.where(node), _WORDS.get(role_of(node), "sum"), over, mesh.size(*over), 1.0)
    factor = float(arg(node, 1))
    return GradientStep(subject.where(node), "divide", (), 1, factor)


def _reasons(subject: Subject, spec: ParameterSpec, due: tuple[str, ...], nodes: list[fx.Node]) -> Iterator[Reason]:
    manifest = subject.graph.manifest
    summed = f"summed once over {', '.join(due)}" if due else "summed over nothing"
    exchanged = spec.layout.is_expert and manifest.mesh.live(("ep",))
    because = ", not over ep: the rows of all its ranks were computed here" if exchanged else ""
    yield subject.reason("reduce-once", f"{summed}{because}", nodes, spec.name)
    ranks = manifest.mesh.data_ranks
    here = f"the mean over {plural(ranks, 'data rank')}" if manifest.grad_reduce == "mean" else "a sum is not divided"
    yield subject.reason("divisor", f"grad_reduce={manifest.grad_reduce}: {here}", nodes, spec.name)
