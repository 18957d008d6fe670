"""``python -m tests.npu_sim [arguments of pytest]``: makes the environment under build/ once and runs the lane in it.

torch_npu goes to a folder of its own, beside the environment that this Python has and with the very torch of it, so
that nothing else ever sees it: whoever imports torch beside torch_npu, and has no CANN, gets an error. What the lane
lacks (gcc, binutils, a network for the first time, a wheel for this platform) makes its tests skip with the reason.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "npu-sim"
REASON = "EP_FX_NPU_SIM_REASON"
WHEEL = "torch_npu"


def main(arguments: list[str]) -> int:
    """Runs pytest on this folder, in the environment where it can be made; pytest's exit code."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    reason = make()
    if reason is None:
        path = filter(None, (str(FOLDER / "site"), os.environ.get("PYTHONPATH")))
        environment.update(PYTHONPATH=os.pathsep.join(path), TASK_QUEUE_ENABLE="0")
        environment["LD_LIBRARY_PATH"] = str(FOLDER / "cann")  # the loader reads it when a process starts
        environment.pop("ASCEND_HOME_PATH", None)  # a CANN that is there is not to be found
    else:
        environment[REASON] = reason
    command = [sys.executable, "-m", "pytest", "-q", "-m", "npu_sim", "tests/npu_sim", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def make() -> str | None:
    """Fills `FOLDER` where it is not filled; the reason where that cannot be."""
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: apt-get install gcc binutils): no stand-ins for CANN"
    site, cann = FOLDER / "site", FOLDER / "cann"
    if not (site / WHEEL).is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        if subprocess.run([*install, "-c", "constraints.txt", "--target", str(site), WHEEL], cwd=ROOT).returncode:
            return f"pip could not install {WHEEL}, see above"
    alone = dict(os.environ, PYTHONPATH=str(site))
    if subprocess.run([sys.executable, str(ROOT / "ep_fx/testing/npu/cann/stubs.py"), str(cann)], env=alone).returncode:
        return "the stand-ins for CANN could not be compiled, see above"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
