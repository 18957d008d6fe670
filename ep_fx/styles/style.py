"""The parallel styles of experts, as a `plan` names them.

    plan = {"*.experts": ExpertTensorParallel()}

A style is a frozen value: it holds nothing but what it says, and two of the same class are equal.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Style:
    """What all styles of experts have in common.

    Attributes:
        mesh_dims: names of the mesh dimensions over which the style splits experts.
    """

    mesh_dims: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class ExpertParallel(Style):
    """Whole experts per rank: the parameters ``[E, ...]`` are split over the mesh dimension ``ep`` along dim 0, and
    tokens travel to their experts over ``ep``."""

    mesh_dims: ClassVar[tuple[str, ...]] = ("ep",)


@dataclass(frozen=True)
class TensorParallel(Style):
    """A part of every expert per rank: ``w1, w3 [E, hidden, dim]`` are split over the mesh dimension ``tp`` along dim 1
    and ``w2 [E, dim, hidden]`` along dim 2; the ranks along ``tp`` hold the same tokens, and their partial outputs are
    added up."""

    mesh_dims: ClassVar[tuple[str, ...]] = ("tp",)


@dataclass(frozen=True)
class ExpertTensorParallel(Style):
    """Both: dim 0 over ``ep``, and each expert's hidden features over ``tp``. Tokens travel over ``ep`` only, between
    ranks with the same place along ``tp``."""

    mesh_dims: ClassVar[tuple[str, ...]] = ("ep", "tp")
