"""torch's attention is one node of the dialect where the target wants that; what it does not cover stays torch's."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_fx
from ep_fx.graph import ParallelGraph, target_name
from ep_fx.testing.fake import fake_mesh
from ep_fx.verify import verify
from tests.models.hf import hf_ids, tiny_hf


class Attention(nn.Module):
    """Attention of torch with options of its own, and a projection that has a gradient."""

    def __init__(self, heads: int = 2, shared: int = 2, **options: Any) -> None:
        super().__init__()
        self.heads, self.shared, self.options = heads, shared, options
        self.q, self.k = nn.Linear(8, heads * 4), nn.Linear(8, shared * 4)
        self.bias = nn.Parameter(torch.zeros(1, 1, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k))
        options = {n: o(self, x) if callable(o) else o for n, o in self.options.items()}
        return F.scaled_dot_product_attention(q, k, k, **options).sum(1)


def _graph(model: nn.Module, target: str | None = "npu", **example: Any) -> ParallelGraph:
    with fake_mesh(fsdp=2) as mesh:
        module = ep_fx.transform(model, mesh, plan={}, target=target, **example)  # type: ignore[arg-type]
    return module.graph


def _names(graph: ParallelGraph) -> list[str]:
    return [name for name in map(target_name, graph) if "attention" in name]


COVERED: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "boolean mask": {"attn_mask": lambda m, x: x[:, None, :, :1] > 0},
    "mask of floats": {"attn_mask": lambda m, x: m.bias.detach()},
    "shared keys": {"heads": 4, "shared": 2, "enable_gqa": True, "is_causal": True},
}
LEFT: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.1},
    "mask with a gradient": {"attn_mask": lambda m, x: m.bias},
    "heads that broadcast": {"heads": 4, "shared": 1},
}


@pytest.mark.parametrize("options", COVERED.values(), ids=COVERED.keys())
def test_one_node_forward_and_one_backward(options: dict[str, Any]) -> None:
    graph = _graph(Attention(**options), example_inputs=(torch.randn(2, 6, 8),))
    assert _names(graph) == ["ep_fx::attention", "ep_fx::attention_backward"]


@pytest.mark.parametrize("options", LEFT.values(), ids=LEFT.keys())
def test_what_it_does_not_cover_is_left_to_torch(options: dict[str, Any]) -> None:
    graph = _graph(Attention(**options), example_inputs=(torch.randn(2, 6, 8),))
    assert not any(name.startswith("ep_fx::attention") for name in _names(graph))


def test_another_target_gets_what_torch_makes_of_it() -> None:
    graph = _graph(Attention(is_causal=True), None, example_inputs=(torch.randn(2, 6, 8),))
    assert not any(name.startswith("ep_fx::attention") for name in _names(graph))


def test_under_autocast_it_runs_in_the_dtype_of_autocast() -> None:
    class Cast(Attention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    graph = _graph(Cast(is_causal=True), example_inputs=(torch.randn(2, 6, 8),))
    node = next(n for n in graph if target_name(n) == "ep_fx::attention")
    assert node.meta["val"][0].dtype is torch.bfloat16


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_models_of_transformers(arch: str) -> None:
    model = tiny_hf(arch)
    graph = _graph(model, example_kwargs={"input_ids": hf_ids(0, 2, 8)})
    verify(graph, ["types"]).raise_if_broken()
    assert _names(graph) == ["ep_fx::attention"] * 2 + ["ep_fx::attention_backward"] * 2
