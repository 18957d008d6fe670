"""``ep-fx doctor`` and the one message about a machine without NPU; the wheel itself is in tests/npu_sim."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ep_fx
from tests.cli.conftest import Run

pytestmark = pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed here")


def test_it_says_what_there_is_and_what_lacks(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert run("doctor", "--json").json["cann"] is None
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    ran = run("doctor", "--json")
    assert ran.code == 1
    found = ran.json
    assert "pip install 'ep_fx[npu]'" in found.pop("problem")
    assert found == {
        "torch": torch.__version__, "torch_npu": None, "cann": str(tmp_path / "lib64"), "device": None,
        "devices": None, "hccl": False, "autoload": False,
    }
    text = run("doctor").out
    assert "torch_npu                      not installed" in text
    assert "\nproblem: a mesh on npu needs torch_npu, which is not installed" in text


def test_a_torch_npu_that_cannot_be_loaded_gives_one_message(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package, record = tmp_path / "torch_npu", tmp_path / "torch_npu-2.13.0.dist-info"
    package.mkdir()
    record.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    (record / "METADATA").write_text("Name: torch_npu\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = run("doctor", "--json").json
    assert (found["torch_npu"], found["device"]) == ("2.13.0", None)
    for part in ("torch_npu 2.13.0 cannot be loaded (libhccl.so: cannot open", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert part in found["problem"]


def test_transform_to_a_mesh_of_npus_says_the_same() -> None:
    mesh = SimpleNamespace(device_type="npu")
    with pytest.raises(RuntimeError, match="a mesh on npu needs torch_npu, which is not installed"):
        ep_fx.transform(nn.Linear(2, 2), mesh)  # type: ignore[arg-type]
