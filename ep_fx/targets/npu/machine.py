"""Whether this machine can run on NPUs: what is installed, what is found, and one message where something lacks.

`state` imports nothing and raises nothing; `require_npu` imports torch_npu where it is not imported yet. What torch
does by itself is out of reach here: with torch_npu installed, ``import torch`` imports it too, and fails where CANN
lacks, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""
from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_LIBRARY = "libascendcl.so"
_PLACES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")


@dataclass(frozen=True)
class NpuState:
    """What there is of an NPU.

    Args:
        torch: version of torch.
        torch_npu: version of torch_npu; None where it is not installed.
        cann: folder of CANN's libraries; None where none was found.
        device: who has made the device `npu` in this process, torch_npu or Python (for tests); None: nobody.
        devices: number of NPUs; None where there is no device `npu`.
        hccl: whether process groups of the backend ``hccl`` can be made.
        autoload: whether ``import torch`` imports torch_npu.
    """

    torch: str
    torch_npu: str | None
    cann: str | None
    device: str | None
    devices: int | None
    hccl: bool
    autoload: bool


def state() -> NpuState:
    """What there is, as far as this process has looked."""
    module = getattr(torch, "npu", None)
    loaded = "torch_npu" in sys.modules
    return NpuState(
        torch=torch.__version__,
        torch_npu=_installed(),
        cann=_cann(),
        device=None if module is None else "torch_npu" if loaded else "Python, for tests",
        devices=None if module is None else module.device_count(),
        hccl=hasattr(dist.Backend, "HCCL"),
        autoload=os.environ.get(AUTOLOAD, "1") == "1",
    )


def require_npu() -> None:
    """Loads torch_npu where nothing has made a device `npu` yet.

    Raises:
        RuntimeError: it cannot be loaded; says what lacks and what to do.
    """
    if getattr(torch, "npu", None) is not None:
        return
    found = _installed()
    if found is None:
        raise RuntimeError(
            "a mesh on npu needs torch_npu, which is not installed: pip install 'ep_fx[npu]', beside CANN; with "
            "target='npu' a model is lowered for it on any mesh and machine"
        )
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"a mesh on npu needs torch_npu, and torch_npu {found} cannot be loaded ({_reason(error)}). CANN: "
            f"{_cann() or 'not found'}; with CANN, source its set_env.sh before Python starts. Without, there is none "
            f"here: take a mesh on another device, and keep {AUTOLOAD}=0, for otherwise `import torch` itself fails"
        ) from error


def _installed() -> str | None:
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return None


def _cann() -> str | None:
    """Folder of the library that every program for the NPU loads first."""
    homes = [home for name in _HOMES if (home := os.environ.get(name))]
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders += [Path(home) / "lib64" for home in (*homes, *_PLACES)]
    return next((str(folder) for folder in folders if (folder / _LIBRARY).exists()), None)


def _reason(error: BaseException) -> str:
    """First line of what was said first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__
