"""Which operators of ATen run on the device: the lists frozen from the dispatcher of torch_npu.

    kernel         torch_npu has a kernel that runs on the device
    composition    PyTorch composes it of others, views among them
    cpu            in neither list: torch_npu copies the operands to the CPU and the result back
"""
from __future__ import annotations

from enum import Enum
from functools import cache
from importlib.resources import files

import torch


class Runs(Enum):
    """Where an operator of ATen runs for npu tensors."""

    KERNEL = "kernel"
    COMPOSITION = "composition"
    CPU = "cpu"


@cache
def listed(name: str) -> frozenset[str]:
    """The operators of the list `name`, ``aten_ops`` or ``aten_compositions``, such as ``aten.div.Tensor``."""
    lines = (files("ep_fx.targets.npu") / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def runs(operator: torch._ops.OpOverload) -> Runs:
    """Where `operator`, of the namespace ``aten``, runs."""
    if str(operator) in listed("aten_ops"):
        return Runs.KERNEL
    return Runs.COMPOSITION if str(operator) in listed("aten_compositions") else Runs.CPU


def has_kernel(operator: torch._ops.OpOverload) -> bool:
    """Whether `operator` runs on the device, itself or composed of others that may."""
    return runs(operator) is not Runs.CPU
