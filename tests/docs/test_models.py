"""docs/models.md lists what the builder builds, neither more nor less, each with its errors or its refusal."""
from __future__ import annotations

import json
from pathlib import Path

from tests.models.families import REFUSED, ROWS
from tests.models.matrix.test_matrix import FOUR, ON_FOUR, TOLERANCE, TWO

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_has_exactly_the_rows_of_the_builder() -> None:
    lines = (DOCS / "models.md").read_text().partition("<!-- generated: models -->")[2].splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]
    assert names == [row.name for row in (*ROWS, *REFUSED)]


def test_every_row_was_measured_within_the_tolerance_or_refused() -> None:
    rows = json.loads((DOCS / "models.json").read_text())
    for row in ROWS:
        meshes = rows[row.name]["meshes"]
        assert set(meshes) == {TWO, *([FOUR] if row.name in ON_FOUR else [])}, row.name
        assert all(float(error) <= TOLERANCE for errors in meshes.values() for error in errors.values()), row.name
    assert all(rows[row.name]["refused"] and not rows[row.name]["meshes"] for row in REFUSED)
