"""Per parameter: over which mesh dimensions its gradient is summed, by what, and what it is divided by.

Read from the graph alone, so it says what will run. Beside it stands what is due, from the layouts and the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ep_fx.graph import ParallelGraph, ParameterSpec, Role, role_of
from ep_fx.verify.reading import arg
from ep_fx.verify.reductions import gradient_path

_WORDS = {Role.REDUCE_GRAD: "reduce-scatter", Role.ALL_REDUCE_GRAD: "all-reduce"}


@dataclass(frozen=True)
class ReductionRow:
    """One trainable parameter.

    Args:
        parameter: its name.
        kind: "expert" or "dense".
        steps: the sums over ranks in the order in which they run, e.g. ``"reduce-scatter over fsdp,ep"``.
        divisor: what the sum is divided by.
        due: mesh dimensions over which its contributions differ.
        inside: mesh dimensions whose sum the exchange of tokens has already made.
    """

    parameter: str
    kind: str
    steps: tuple[str, ...]
    divisor: float
    due: tuple[str, ...]
    inside: tuple[str, ...]


def reduction_table(graph: ParallelGraph) -> tuple[ReductionRow, ...]:
    """One row for each trainable parameter, in parameter order."""
    return tuple(_row(graph, spec, graph.gradients[spec.name]) for spec in graph.manifest.trainable)


def _row(graph: ParallelGraph, spec: ParameterSpec, value: object) -> ReductionRow:
    mesh = graph.manifest.mesh
    due = graph.manifest.reduce_dims(spec)
    path = gradient_path(value, due=bool(due))
    steps = []
    for node, _ in reversed(path.reduces):
        group = arg(node, 2) if role_of(node) is Role.REDUCE_GRAD else arg(node, 1)
        dims = mesh.dims_of(str(group)) or (f"unknown group {group}",)
        steps.append(f"{_WORDS.get(role_of(node), 'reduction')} over {','.join(dims)}")
    inside = mesh.live(("ep",)) if spec.layout.is_expert else ()
    return ReductionRow(
        spec.name, "expert" if spec.layout.is_expert else "dense", tuple(steps), path.divisor, due, inside
    )


def format_reductions(rows: Sequence[ReductionRow]) -> str:
    """The rows as a markdown table."""
    lines = [
        "| parameter | kind | contributions differ over | summed by the exchange over | summed by | divided by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            f"`{row.parameter}`",
            row.kind,
            ", ".join(row.due) or "-",
            ", ".join(row.inside) or "-",
            ", then ".join(row.steps) or "-",
            f"{row.divisor:g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
