"""Looks at the local variables of a method between two of its statements, and what a window of statements changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ep_fx.capture.experts.module_list.compare import equal
from ep_fx.capture.experts.module_list.source import SHAPES
from ep_fx.capture.experts.module_list.trials import Case


@dataclass
class Look:
    """The local variables at one place of a run: tensors as they were then, what else there was, and the state.

    Args:
        case: the probe of this run.
        scale: of the experts' answers in it, see `KnownExperts`.
    """

    tensors: dict[str, Tensor]
    others: dict[str, Any]
    state: list[Tensor]
    case: Case
    scale: Tensor


def look_at(
    variables: dict[str, Any],
    block: nn.Module,
    copies: dict[tuple[int, int], tuple[Tensor, Tensor]],
    case: Case,
    scale: Tensor,
) -> Look:
    def copied(tensor: Tensor) -> Tensor:
        """One copy of each state of a tensor, so that equal states are one object."""
        key = (id(tensor), tensor._version)
        if key not in copies:
            copies[key] = (tensor, tensor.detach().clone())
        return copies[key][1]

    tensors = {n: copied(v) for n, v in variables.items() if isinstance(v, Tensor)}
    others = {n: _frozen(v) for n, v in variables.items() if not isinstance(v, (Tensor, nn.Module))}
    return Look(tensors, others, [copied(x) for x in (*block.buffers(), *block.parameters())], case, scale)


def _frozen(value: Any) -> Any:
    """What shows that a container was changed in place."""
    if isinstance(value, (list, set, dict)):
        return type(value), len(value), tuple(id(x) for x in value)
    return id(value)


def changed(runs: list[dict[int, Look]], start: int, end: int, names: set[str]) -> set[str]:
    """Those of `names` whose value another one stood for at `end`, though they were not bound anew."""
    found: set[str] = set()
    for run in runs:
        if end not in run:
            return {"", " "}  # not every run came there: no window
        before, after = run[start], run[end]
        found |= {n for n in names if n in before.tensors and not equal(after.tensors.get(n), before.tensors[n], 0.0)}
        found |= {n for n in names if n in before.others and after.others.get(n) != before.others[n]}
    return found


def state_changed(runs: list[dict[int, Look]], start: int, end: int) -> bool:
    return any(
        not equal(after, before, 0.0)
        for run in runs
        for before, after in zip(run[start].state, run[end].state, strict=True)
    )


def shape_expression(target: str, runs: list[dict[int, Look]], start: int, end: int) -> str | None:
    """A variable before the window, or an argument of the method, that has the shape of the target in all runs."""
    shapes = [run[end].tensors[target].shape for run in runs]
    for name in runs[0][start].tensors:
        found = [run[start].tensors.get(name) for run in runs]
        if all(x is not None and x.shape == shape for x, shape in zip(found, shapes, strict=True)):
            return f"{name}.shape"
    for name in _entry(runs):
        if all(run[-1].tensors[name].shape == s for run, s in zip(runs, shapes, strict=True)):
            return f"{SHAPES}[{name!r}]"
    return None


def _entry(runs: list[dict[int, Look]]) -> list[str]:
    return list(runs[0][-1].tensors) if all(-1 in run for run in runs) else []

