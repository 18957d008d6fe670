"""What the matrix measured, kept in docs/models.json, from which docs/models.md is made."""
from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.models.architectures import Architecture, build
from tests.models.families import REFUSED, ROWS
from tests.models.matrix.measure import Findings

PATH = Path(__file__).parents[3] / "docs" / "models.json"
_FLAGS = (("has_bias", "bias"), ("is_transposed", "transposed"), ("has_post_expert_norm", "norm after each expert"))


def flags_of(module: Any) -> str:
    """The flags of a decorated experts module that are not the usual ones."""
    found = [text for flag, text in _FLAGS if getattr(module, flag)]
    found += [] if module.has_gate else ["no gate"]
    found += [] if module.is_concatenated else ["interleaved"]
    return ", ".join(found) or "gate"


def facts_of(row: Architecture) -> dict[str, Any]:
    """What the table says of an architecture without running it."""
    experts = [module for module in build(row).modules() if hasattr(module, "is_concatenated")]
    remarks = [row.remark, "auxiliary loss" if row.aux else "", "" if row.dynamic else "static sizes here"]
    return {
        "model": row.model,
        "experts": type(experts[0]).__name__,
        "flags": flags_of(experts[0]),
        "remark": "; ".join(filter(None, remarks)),
        "refused": row.refused,
    }


def record(row: Architecture, mesh: str, findings: list[Findings]) -> None:
    """Enters the worst errors of all ranks; what other rows and meshes have stays."""
    entry = facts_of(row)
    with _locked():
        _enter(row, entry, mesh, findings)


@contextmanager
def _locked() -> Iterator[None]:
    """Held by one process of a parallel test run at a time."""
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _enter(row: Architecture, entry: dict[str, Any], mesh: str, findings: list[Findings]) -> None:
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    entry["meshes"] = known.get(row.name, {}).get("meshes", {})
    if findings:
        worst = {
            "output": max(error for f in findings for error in f.outputs.values()),
            "gradient": max(error for f in findings for error in f.gradients.values()),
        }
        entry["meshes"][mesh] = {name: f"{error:.0e}" for name, error in worst.items()}
    known[row.name] = entry
    order = [r.name for r in (*ROWS, *REFUSED) if r.name in known]
    PATH.write_text(json.dumps({name: known[name] for name in order}, indent=1) + "\n")
