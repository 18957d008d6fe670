"""What is frozen in the repository is what the installed wheel has."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ep_fx.targets.npu
import ep_fx.testing.npu
from ep_fx.testing.npu import wheel

SCHEMAS = (Path(ep_fx.testing.npu.__file__).parent / "schemas.txt").read_text().splitlines()


@pytest.mark.parametrize("name", ["aten_ops.txt", "aten_compositions.txt"])
def test_operators_of_aten(request: pytest.FixtureRequest, name: str) -> None:
    path, text = Path(ep_fx.targets.npu.__file__).parent / name, wheel.texts()[name]
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_schema(schema: str) -> None:
    name = schema.partition("(")[0].removeprefix("npu::")
    assert str(getattr(torch.ops.npu, name).default._schema) == schema


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_kernel_of_the_device_and_of_fakes(schema: str) -> None:
    name = schema.partition("(")[0]
    for key in ("PrivateUse1", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), key
