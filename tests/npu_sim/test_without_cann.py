"""torch_npu is installed and CANN is not there: one clear message, and all that needs no NPU works."""
from __future__ import annotations

import json
import os
import subprocess
import sys

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def _python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    lacking = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=lacking | variables, timeout=50, check=False)


def test_import_names_the_variable_in_one_error() -> None:
    ran = _python("-c", "import ep_fx")
    assert ran.returncode == 1
    assert ran.stderr.count("Traceback") == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: import torch failed")
    assert f"set {AUTOLOAD}=0" in last
    assert "libhccl.so" in last


def test_with_the_variable_the_package_works_and_says_why_there_is_no_npu() -> None:
    ran = _python("-m", "ep_fx.cli", "doctor", "--json", **{AUTOLOAD: "0"})
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["torch_npu"], found["cann"], found["device"], found["autoload"]) == ("2.13.0", None, None, False)
    assert "libhccl.so" in found["problem"]
    assert f"{AUTOLOAD}=0" in found["problem"]


def test_with_stand_ins_the_device_is_there() -> None:
    command = [sys.executable, "-m", "ep_fx.cli", "doctor", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    found = json.loads(ran.stdout[ran.stdout.index("{") :])
    assert (found["device"], found["devices"], found["hccl"], found["problem"]) == ("torch_npu", 8, True, None)
