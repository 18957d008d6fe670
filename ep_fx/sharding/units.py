"""FSDP units: which parameters are gathered together.

By default each block of the longest outermost ModuleList is a unit, the experts inside it are a unit of their own, and
the rest of the model is the unit "root".
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

ROOT = "root"


def find_units(model: nn.Module, experts: Sequence[str], patterns: Sequence[str] | None) -> dict[str, str]:
    """Unit of each parameter name of `model`.

    Args:
        experts: module paths of the experts; each is a unit.
        patterns: module-path patterns (fnmatch) of the units; None: the default.

    Raises:
        ValueError: a pattern that matches no module.
    """
    prefixes = [*experts, *(_blocks(model) if patterns is None else _matches(model, patterns))]
    prefixes.sort(key=len, reverse=True)
    units: dict[str, str] = {}
    for name, _ in model.named_parameters():
        units[name] = next((p for p in prefixes if name.startswith(p + ".")), ROOT)
    return units


def _blocks(model: nn.Module) -> list[str]:
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [path for path in lists if not any(path.startswith(other + ".") for other in lists)]
    if not outer:
        return []
    path = max(outer, key=lambda p: len(lists[p]))
    return [f"{path}.{index}" for index in range(len(lists[path]))]


def _matches(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    paths = [path for path, _ in model.named_modules() if path]
    found: list[str] = []
    for pattern in patterns:
        hits = [path for path in paths if fnmatchcase(path, pattern)]
        if not hits:
            raise ValueError(f"units: pattern {pattern!r} matches no module; modules are e.g. {paths[:8]}")
        found += hits
    return found
