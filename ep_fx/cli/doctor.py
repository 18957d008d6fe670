"""``ep-fx doctor``: what of an NPU this machine has, and what lacks."""

from __future__ import annotations

from dataclasses import asdict

from ep_fx.cli import options as opt
from ep_fx.cli.failure import Code
from ep_fx.cli.output import print_json, print_table, print_text
from ep_fx.explain import Table
from ep_fx.targets.npu.machine import AUTOLOAD, NpuState, require_npu, state

NOTE = "on the CPU and on CUDA nothing of this is needed; with target='npu' a model is lowered everywhere"


def doctor(json: opt.JsonOption = False) -> int:
    """Whether this machine can run what is emitted for an NPU: torch_npu, CANN, devices, HCCL.

    Exit 1 where it cannot.
    """
    problem = None
    try:
        require_npu()
    except RuntimeError as error:
        problem = str(error)
    found = state()
    if json:
        print_json({**asdict(found), "problem": problem})
    else:
        print_table(Table("npu", ("what", "found"), _rows(found), NOTE))
        print_text(f"problem: {problem}" if problem else "no problem found")
    return int(Code.OK if problem is None else Code.BROKEN)


def _rows(found: NpuState) -> tuple[tuple[str, str], ...]:
    return (
        ("torch", found.torch),
        ("torch_npu", found.torch_npu or "not installed"),
        ("CANN", found.cann or "not found"),
        ("device npu", found.device or "none"),
        ("devices", "-" if found.devices is None else str(found.devices)),
        ("backend hccl", "registered" if found.hccl else "not registered"),
        (AUTOLOAD, "on: import torch loads torch_npu, where it is installed" if found.autoload else "off"),
    )
