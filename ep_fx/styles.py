"""Parallel styles that a `plan` names."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertParallel:
    """Experts of the matched modules are split over the mesh dimension ``ep`` along dim 0 of their parameters."""
