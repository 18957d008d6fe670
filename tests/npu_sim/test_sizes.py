"""Lane (c): models of real size on 64 and 1,024 ranks in one process, under torch_npu's own Meta kernels."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ep_fx
from ep_fx.testing.fake import fake_mesh
from tests.npu_sim.fake_run import run_emitted, run_nodes

LENGTH = 4096
LAYERS = {"num_hidden_layers": 2}
Make = Callable[[Any], Any]


def _deepseek(transformers: Any) -> Any:
    """DeepSeek-V3 as published, but for the number of layers: one is dense, one has 256 experts."""
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**LAYERS, first_k_dense_replace=1))


def _mixtral(transformers: Any) -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LAYERS))


def _qwen3(transformers: Any) -> Any:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**LAYERS))


CASES: dict[str, tuple[Make, dict[str, int]]] = {
    "deepseek_v3-1024": (_deepseek, {"fsdp": 64, "ep": 16}),
    "deepseek_v3-64": (_deepseek, {"replicate": 2, "fsdp": 4, "ep": 8}),
    "mixtral-64": (_mixtral, {"fsdp": 8, "ep": 8}),
    "qwen3_moe-64": (_qwen3, {"fsdp": 4, "ep": 16}),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_every_node_and_the_emitted_functions(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    make, sizes = CASES[case]
    with torch.device("meta"):
        model = make(transformers).to(torch.bfloat16)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64, device="npu")
    with fake_mesh(device="npu", **sizes) as mesh:
        module = ep_fx.transform(model, mesh, example_kwargs={"input_ids": ids}, dynamic=False)
        nodes, wrong = run_nodes(module.lowered)
        parameters, gradients = run_emitted(module.programs[0])
    assert nodes > 500
    assert wrong == []
    assert [(x.shape, x.dtype, x.device.type) for x in gradients] == [(x.shape, x.dtype, "npu") for x in parameters]
