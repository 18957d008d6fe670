"""What a lowered MoE layer calls: so many kernels a layer and direction, and none of the dialect's routing."""
from __future__ import annotations

import pytest
import torch
from torch._prims_common import is_contiguous_or_false

from ep_fx.graph import ParallelGraph, Phase, Role, is_collective, is_mutation, role_of
from ep_fx.targets.npu.kernels import KERNELS
from ep_fx.targets.npu.lowering import kept_reason
from tests.npu.lowered import calls, hf_for_npu, targets, tiny_for_npu

# of one MoE layer whose experts are exchanged over ep
FORWARD = {
    "npu_moe_token_permute": 2, "tokens_per_expert": 1, "dispatch_context": 1, "npu_grouped_matmul": 2,
    "npu_moe_token_unpermute": 2, "npu_swiglu": 1,
}  # fmt: skip
BACKWARD = {
    "npu_moe_token_unpermute_grad_v2": 2, "npu_grouped_matmul": 4, "npu_moe_token_permute_grad_v2": 2,
    "npu_swiglu_backward": 1,
}  # fmt: skip
DIALECT = (Role.PERMUTE, Role.PERMUTE_BACKWARD, Role.UNPERMUTE, Role.UNPERMUTE_BACKWARD, Role.REGROUP, Role.UNGROUP,
           Role.GROUPED_MM, Role.GROUPED_MM_BACKWARD, Role.ADD_BIAS, Role.ADD_BIAS_BACKWARD)  # fmt: skip


def _routing(graph: ParallelGraph, phase: Phase) -> dict[str, int]:
    known = FORWARD if phase is Phase.FORWARD else BACKWARD
    return {name: count for name, count in calls(graph, phase).items() if name in known}


@pytest.mark.parametrize(
    ("arch", "layers"), [("mixtral", 2), ("qwen3_moe", 2), ("deepseek_v3", 1)]
)
def test_kernels_of_each_layer_and_direction(arch: str, layers: int) -> None:
    graph = hf_for_npu(arch, fsdp=2, ep=2).lowered
    assert _routing(graph, Phase.FORWARD) == {name: layers * count for name, count in FORWARD.items()}
    assert _routing(graph, Phase.BACKWARD) == {name: layers * count for name, count in BACKWARD.items()}
    assert not [node for node in graph if role_of(node) in DIALECT]


def test_regions_that_are_not_exchanged() -> None:
    graph = hf_for_npu("mixtral", fsdp=2).lowered
    own = {**FORWARD, "npu_moe_token_permute": 1, "npu_moe_token_unpermute": 1}
    del own["dispatch_context"]
    assert _routing(graph, Phase.FORWARD) == {name: 2 * count for name, count in own.items()}
    assert _routing(graph, Phase.BACKWARD) == {
        "npu_moe_token_unpermute_grad_v2": 2, "npu_grouped_matmul": 8, "npu_moe_token_permute_grad_v2": 2,
        "npu_swiglu_backward": 2,
    }  # fmt: skip


@pytest.mark.parametrize("sizes", [{"replicate": 2, "fsdp": 1, "ep": 2}, {"fsdp": 2, "ep": 2, "tp": 2}], ids=str)
def test_other_meshes_call_the_same(sizes: dict[str, int]) -> None:
    graph = hf_for_npu("mixtral", **sizes).lowered
    assert _routing(graph, Phase.FORWARD) == {name: 2 * count for name, count in FORWARD.items()}
    assert _routing(graph, Phase.BACKWARD) == {name: 2 * count for name, count in BACKWARD.items()}


def test_biases_go_to_the_kernel_and_their_gradients_are_sums_of_atens() -> None:
    found = calls(hf_for_npu("gpt_oss", fsdp=2, ep=2).lowered)
    assert (found["npu_grouped_matmul"], found["bias_grad"]) == (12, 4)


def test_weights_that_travel_with_their_rows_use_the_sort_of_the_rows() -> None:
    """One sort for a region, whatever is moved; the weights' gradient comes back by it too."""
    graph = tiny_for_npu(scores="positional", score="before").lowered
    assert _routing(graph, Phase.FORWARD) == {
        "npu_moe_token_permute": 2, "dispatch_context": 2, "npu_moe_token_unpermute": 2,
    }  # fmt: skip
    assert calls(graph, Phase.FORWARD)["npu_moe_token_unpermute_grad_v2"] == 2
    assert calls(graph, Phase.BACKWARD)["npu_moe_token_permute_grad_v2"] == 4


def test_separate_weights_of_gate_and_up_are_one_product() -> None:
    graph = tiny_for_npu(grouped=True).lowered
    found = calls(graph)
    assert (found["npu_grouped_matmul"], found["npu_swiglu"], found["npu_swiglu_backward"]) == (12, 2, 2)
    assert not any("silu" in name for name in targets(graph))


def test_gradients_are_contiguous_where_they_are_sent() -> None:
    """What enters a collective is contiguous as recorded, or comes from a function that makes it so."""
    makes = {*map(id, KERNELS.values())}
    for module in (hf_for_npu("mixtral", fsdp=2, ep=2), tiny_for_npu(grouped=True)):
        sent = [value for node in module.lowered if is_collective(node) for value in node.all_input_nodes]
        tensors = [node for node in sent if isinstance(node.meta.get("val"), torch.Tensor)]
        assert len(tensors) >= 10
        loose = [node for node in tensors if not is_contiguous_or_false(node.meta["val"])]
        assert {node for node in loose if id(node.target) not in makes} == set()


def test_nothing_is_written_in_place_but_what_is_freed() -> None:
    written = [node for node in hf_for_npu("mixtral", fsdp=2, ep=2).lowered if is_mutation(node)]
    assert {role_of(node) for node in written} == {Role.RESHARD}


def test_one_wait_for_the_device_a_region() -> None:
    module = hf_for_npu("mixtral", fsdp=2, ep=2)
    assert calls(module.lowered)["dispatch_context"] == 2
    assert len([node for node in module.graph if role_of(node) is Role.CONTEXT]) == 2
    assert not any("_local_scalar_dense" in name or "_assert_async" in name for name in targets(module.lowered))


def test_double_stays_with_the_dialect_and_says_why() -> None:
    graph = hf_for_npu("mixtral", torch.float64, fsdp=2, ep=2).lowered
    kept = {role_of(node): kept_reason(node) for node in graph if role_of(node) in DIALECT}
    assert set(kept) == set(DIALECT[:8])
    assert all(reason is not None and "float64" in reason for reason in kept.values())
