"""The rewrites, one file each, the default pipeline, and how a pipeline is named: as text or as passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ep_fx.graph import Pass, parse_pipeline
from ep_fx.passes._outside import GROUP, outside_passes
from ep_fx.passes.dead_code import DeadCode
from ep_fx.passes.expert_parallel import ExpertParallel
from ep_fx.passes.fsdp import Fsdp
from ep_fx.passes.tensor_parallel import TensorParallel

__all__ = [
    "GROUP",
    "DeadCode",
    "ExpertParallel",
    "Fsdp",
    "TensorParallel",
    "default_pipeline",
    "known_passes",
    "pipeline_of",
]


def default_pipeline(over_tp: bool = False) -> tuple[Pass, ...]:
    """The passes that a transform runs, in order.

    Args:
        over_tp: whether the mesh has ranks along ``tp``.
    """
    cut = (TensorParallel(),) if over_tp else ()
    return (DeadCode(), ExpertParallel(), *cut, Fsdp(), DeadCode())


def known_passes() -> Mapping[str, type[Pass]]:
    """Every pass that a pipeline may name: those of this folder, and those that installed packages contribute.

    Raises:
        ValueError: a contribution that is no pass, or has the name of another.
    """
    own: dict[str, type[Pass]] = {p.name: p for p in (DeadCode, ExpertParallel, Fsdp, TensorParallel)}
    return {**own, **outside_passes(own)}


def pipeline_of(pipeline: str | Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes of a pipeline given as text or as passes.

    Raises:
        TypeError: neither.
        ValueError: a text that names an unknown pass or option, or gives an option what it does not accept.
    """
    if isinstance(pipeline, str):
        return parse_pipeline(pipeline, known_passes())
    if isinstance(pipeline, Sequence) and all(isinstance(step, Pass) for step in pipeline):
        return tuple(cast(Sequence[Pass], pipeline))
    raise TypeError(f"pipeline must be a text such as 'expert-parallel,fsdp' or a sequence of passes, got {pipeline!r}")
