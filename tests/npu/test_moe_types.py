"""Every function of the target, on the recorded fakes of its arguments, gives what is recorded of its node."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from ep_fx import EPModule
from ep_fx.graph import ParallelGraph
from ep_fx.targets.npu.kernels import COMPOSITIONS, KERNELS
from ep_fx.verify.types import _difference
from tests.npu.lowered import hf_for_npu, tiny_for_npu

FUNCTIONS = frozenset(map(id, (KERNELS | COMPOSITIONS).values()))
MODULES = {
    "mixtral": lambda: hf_for_npu("mixtral", fsdp=2, ep=2),
    "bf16": lambda: hf_for_npu("mixtral", torch.bfloat16, fsdp=2, ep=2),
    "one rank": lambda: hf_for_npu("mixtral", fsdp=2),
    "tp": lambda: hf_for_npu("mixtral", fsdp=2, ep=2, tp=2),
    "biases": lambda: hf_for_npu("gpt_oss", fsdp=2, ep=2),
    "shared experts": lambda: hf_for_npu("deepseek_v3", fsdp=2, ep=2),
    "weights": lambda: tiny_for_npu(scores="positional", score="before"),
    "separate": lambda: tiny_for_npu(grouped=True),
}  # fmt: skip


def differences(graph: ParallelGraph) -> tuple[int, list[str]]:
    """How many nodes were compared, and what differs."""
    known = {node: node.meta["val"] for node in graph if node.meta.get("val") is not None}
    mode = detect_fake_mode([value for value in known.values() if isinstance(value, torch.Tensor)])
    assert mode is not None and mode.shape_env is not None  # noqa: PT018
    found, names, compared = [], dict[Any, Any](), 0
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols(), mode.shape_env.suppress_guards():
        for node in graph:
            if id(node.target) not in FUNCTIONS or node not in known:
                continue
            arguments = pytree.tree_map(lambda a: known.get(a, a) if isinstance(a, torch.fx.Node) else a, node.args)
            result = node.target(*arguments)  # type: ignore[operator]
            compared += 1
            if (difference := _difference(result, known[node], names)) is not None:
                found.append(f"%{node.name}: {difference}")
    return compared, found


@pytest.mark.parametrize("name", MODULES)
def test_types(name: str) -> None:
    module: EPModule = MODULES[name]()
    compared, found = differences(module.lowered)
    assert compared >= 4
    assert not found
