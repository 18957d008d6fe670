"""A lowered MoE layer of each form: so many kernels a direction, types that fit, no fallback, contiguous exchanges.

All of one model in one test: a capture costs more than the checks.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._guards import detect_fake_mode
from torch._prims_common import is_contiguous_or_false
from torch.utils import _pytree as pytree

from ep_fx import EPModule
from ep_fx.graph import ParallelGraph, Phase, Role, is_collective, is_mutation, role_of
from ep_fx.targets.npu.coverage import FALLBACKS, Kind, coverage, require_kernels
from ep_fx.targets.npu.kernels import COMPOSITIONS, KERNELS
from ep_fx.verify.types import difference
from tests.models.hand_moe import HandMoE, tokens_for
from tests.models.listed import InModel, SplitSorted, tokens_of
from tests.models.tiny_moe import token_ids
from tests.models.titan import HAS_TITAN, TitanModel
from tests.npu.lowered import calls, for_npu, layer_for_npu, targets, tiny_for_npu

FUNCTIONS = frozenset(map(id, (KERNELS | COMPOSITIONS).values()))
EP = {"fsdp": 2, "ep": 2}
ROUTED = {"npu_moe_token_permute": 2, "npu_moe_token_unpermute": 2, "tokens_per_expert": 1, "dispatch_context": 1}
ROUTED_BACK = {"npu_moe_token_unpermute_grad_v2": 2, "npu_moe_token_permute_grad_v2": 2}
FORWARD = {**ROUTED, "npu_grouped_matmul": 2, "npu_swiglu": 1}
BACKWARD = {**ROUTED_BACK, "npu_grouped_matmul": 4, "npu_swiglu_backward": 1}
LOCAL = {**FORWARD, "npu_moe_token_permute": 1, "npu_moe_token_unpermute": 1, "dispatch_context": 0}
LOCAL_BACK = {**BACKWARD, "npu_moe_token_unpermute_grad_v2": 1, "npu_moe_token_permute_grad_v2": 1}
OWN = {"tokens_per_expert": 0, "npu_moe_token_permute": 1, "npu_moe_token_unpermute": 1}
"""Of models that sort by themselves: the exchange alone."""
OWN_BACK = {"npu_moe_token_unpermute_grad_v2": 1, "npu_moe_token_permute_grad_v2": 1}
BIASED_BACK = {**BACKWARD, "bias_grad": 2, "npu_swiglu_backward": 0}
Counts = dict[str, int]

MODELS: dict[str, tuple[Callable[[], EPModule], Counts, Counts]] = {
    "mixtral": (lambda: layer_for_npu("mixtral", **EP), FORWARD, BACKWARD),
    "qwen3_moe": (lambda: layer_for_npu("qwen3_moe", **EP), FORWARD, BACKWARD),
    "deepseek_v3 in bf16": (lambda: layer_for_npu("deepseek_v3", torch.bfloat16, **EP), FORWARD, BACKWARD),
    "gpt_oss": (lambda: layer_for_npu("gpt_oss", **EP), {**FORWARD, "npu_swiglu": 0}, BIASED_BACK),
    "mixtral, ep 1": (lambda: layer_for_npu("mixtral", fsdp=2), LOCAL, LOCAL_BACK),
    "mixtral, replicate": (lambda: layer_for_npu("mixtral", replicate=2, fsdp=1, ep=2), FORWARD, BACKWARD),
    "mixtral, tp": (lambda: layer_for_npu("mixtral", **EP, tp=2), FORWARD, BACKWARD),
    "separate weights": (lambda: tiny_for_npu(blocks=1, grouped=True), {**FORWARD, **OWN}, {**BACKWARD, **OWN_BACK}),
    "scores that travel": (
        lambda: tiny_for_npu(blocks=1, grouped=True, scores="positional", score="before"),
        {**FORWARD, **OWN, "npu_moe_token_unpermute_grad_v2": 1},
        {**BACKWARD, **OWN_BACK, "npu_moe_token_permute_grad_v2": 2},
    ),
    "a product of its own": (
        lambda: tiny_for_npu(blocks=1),
        {**ROUTED, **OWN, "npu_grouped_matmul": 0}, {**OWN_BACK, "npu_grouped_matmul": 0},
    ),
    "a list of modules": (
        lambda: for_npu(InModel(SplitSorted), EP, (tokens_of(0),)), FORWARD, {**BACKWARD, "bias_grad": 1}
    ),
    "one matrix": (
        lambda: for_npu(HandMoE(grouped=True), EP, (tokens_for([0, 1, 2, 3]),)),
        {**ROUTED, **OWN, "npu_grouped_matmul": 1},
        {"npu_grouped_matmul": 1, "npu_moe_token_unpermute_grad_v2": 1, "npu_moe_token_permute_grad_v2": 0},
    ),
}  # fmt: skip
if HAS_TITAN:
    MODELS["torchtitan"] = (lambda: for_npu(TitanModel(), EP, (token_ids(0),)), FORWARD, BACKWARD)


@pytest.mark.parametrize("name", MODELS)
def test_lowered(name: str) -> None:
    make, forward, backward = MODELS[name]
    module = make()
    _assert_counts(module.lowered, Phase.FORWARD, forward)
    _assert_counts(module.lowered, Phase.BACKWARD, backward)
    _assert_covered(module.lowered)
    _assert_contiguous(module.lowered)
    _assert_out_of_place(module.lowered)
    assert _differences(module.lowered) == []
    waits = [sum(role_of(node) is Role.CONTEXT for node in graph) for graph in (module.graph, module.lowered)]
    assert waits == [forward["dispatch_context"]] * 2
    assert not any("_local_scalar_dense" in target or "_assert" in target for target in targets(module.lowered))


def _assert_counts(graph: ParallelGraph, phase: Phase, wanted: Counts) -> None:
    found = calls(graph, phase)
    assert {name: found[name] for name in wanted} == wanted


def _assert_covered(graph: ParallelGraph) -> None:
    rows = coverage(graph)
    require_kernels(rows)
    inside = [row for row in rows if row.region is not None]
    assert {row.phase for row in inside} == set(Phase)
    assert not [row for row in inside if row.kind in FALLBACKS]
    assert {Kind.KERNEL, Kind.COMPOSITION} <= {row.kind for row in inside}


def _assert_contiguous(graph: ParallelGraph) -> None:
    """What enters a collective is contiguous as recorded, or comes from a function that makes it so, or the collective
    is one of the dialect, which makes it so."""
    sent = [value for node in graph if is_collective(node) for value in node.all_input_nodes]
    tensors = [node for node in sent if isinstance(node.meta.get("val"), torch.Tensor)]
    assert len(tensors) >= 4
    loose = [node for node in tensors if not is_contiguous_or_false(node.meta["val"])]
    users = {user for node in loose if id(node.target) not in FUNCTIONS for user in node.users if is_collective(user)}
    assert {role_of(user) for user in users} <= {Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD, Role.UNSHARD}


def _assert_out_of_place(graph: ParallelGraph) -> None:
    """What is written is freed memory, a buffer, or made in pieces."""
    written = [node for node in graph if is_mutation(node) and role_of(node) is not Role.RESHARD]
    assert {str(node.target) for node in written} <= {"aten.copy_.default", "aten.add_.Tensor"}


def _differences(graph: ParallelGraph) -> list[str]:
    """Where a function of the target, on the recorded fakes of its arguments, gives another type than is recorded."""
    known = {node: node.meta["val"] for node in graph if node.meta.get("val") is not None}
    mode = detect_fake_mode([value for value in known.values() if isinstance(value, torch.Tensor)])
    assert mode is not None
    assert mode.shape_env is not None
    found, names, compared = [], dict[Any, Any](), 0
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols(), mode.shape_env.suppress_guards():
        for node in graph:
            if id(node.target) not in FUNCTIONS or node not in known:
                continue
            arguments = pytree.tree_map(lambda a: known.get(a, a) if isinstance(a, torch.fx.Node) else a, node.args)
            result = node.target(*arguments)  # type: ignore[operator]
            compared += 1
            if (other := difference(result, known[node], names)) is not None:
                found.append(f"%{node.name}: {other}")
    assert compared >= 4
    return found
