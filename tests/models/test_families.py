"""The table has every family of transformers with decorated experts, and its models are what the rows say."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.architectures import Architecture, build, inputs_of
from tests.models.families import ROWS, UNDECORATED

_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)


def decorated_classes() -> dict[str, set[str]]:
    """Names of the decorated experts classes by family, from the source of transformers."""
    models = Path(transformers.__file__).parent / "models"
    found = {path.parent.name: set(_DECORATED.findall(path.read_text())) for path in models.glob("*/modeling_*.py")}
    return {family: names for family, names in found.items() if names}


def test_every_family_with_decorated_experts_has_a_row() -> None:
    assert {row.family for row in ROWS} == set(decorated_classes())
    assert not {row.family for row in UNDECORATED} & set(decorated_classes())


def test_names_are_unique() -> None:
    names = [row.name for row in (*ROWS, *UNDECORATED)]
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_decorated_class_is_in_a_model() -> None:
    built = {(row.family, type(module).__name__) for row in ROWS for module in build(row).modules()}
    assert [(f, name) for f, names in decorated_classes().items() for name in names if (f, name) not in built] == []


@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROWS, *UNDECORATED], ids=lambda row: row.name)
def test_models_are_tiny_and_run(row: Architecture) -> None:
    model = build(row)
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 6_000_000
    output = model(**inputs_of(row, 0))
    assert output.get("loss") is None or output.loss.isfinite()
    assert not row.aux or output.aux_loss.isfinite()
    assert row.decorated == any(hasattr(module, "is_concatenated") for module in model.modules())


def test_tables_of_experts_name_different_experts_for_a_token() -> None:
    model = build(next(row for row in ROWS if row.family == "deepseek_v4"))
    table = model.get_buffer("model.layers.0.mlp.gate.tid2eid")
    assert (table[:, 0] != table[:, 1]).all()
    assert torch.equal(table.unique(), torch.arange(8))
