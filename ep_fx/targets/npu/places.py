"""Rule `on-device`: no argument of a lowered graph names the CPU, and inside of MoE regions nothing runs there.

Outside of regions an operator without a kernel is slow and right; inside it would stop every rank in every layer.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ep_fx.targets.npu.coverage import Kind, region_nodes, runs_by
from ep_fx.verify import Facts, Violation, rule


@rule("on-device", "device arguments name the NPU, and no node inside of an MoE region runs on the CPU")
def on_device(facts: Facts) -> Iterator[Violation]:
    regions = region_nodes(facts.graph)
    for node in facts.nodes:
        if node.op != "call_function":
            continue
        facts.checked += 1
        leaves = pytree.tree_leaves((node.args, {k: v for k, v in node.kwargs.items() if k != "device"}))
        if _is_cpu(node.kwargs.get("device")) or any(isinstance(a, torch.device) and _is_cpu(a) for a in leaves):
            yield Violation(node, 'a tensor of the device: device="npu"', "the CPU", 'pass "npu"')
        if node in regions and (found := runs_by(node))[0] is Kind.CPU:
            yield Violation(
                node, f"kernels of the NPU inside of {regions[node]!r}", f"{node.target}: {found[1]}",
                "compute it of operators that the device has, or outside of the experts",
            )  # fmt: skip


def _is_cpu(device: Any) -> bool:
    return str(device).partition(":")[0] == "cpu"
