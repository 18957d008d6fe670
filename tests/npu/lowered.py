"""Models transformed for the NPU on fake meshes, each once for a run of the tests, and counts of what they call."""
from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import fx, nn

import ep_fx
from ep_fx import EPModule
from ep_fx.graph import ParallelGraph, Phase, info_of
from ep_fx.targets.npu.kernels import COMPOSITIONS, KERNELS
from ep_fx.testing.fake import fake_mesh
from tests.models.hf import hf_ids, tiny_hf
from tests.models.tiny_moe import TinyMoE, token_ids

_ONE_LAYER: dict[str, dict[str, int]] = {"deepseek_v3": {"first_k_dense_replace": 0}}
"""What a model of one layer needs so that its experts are in it."""


@functools.cache
def hf_for_npu(arch: str, dtype: torch.dtype = torch.float32, **sizes: int) -> EPModule:
    """The tiny model of the row `arch`, transformed on a fake mesh of these sizes."""
    return for_npu(tiny_hf(arch).to(dtype), sizes, kwargs={"input_ids": hf_ids(0, 2, 8)})


@functools.cache
def layer_for_npu(arch: str, dtype: torch.dtype = torch.float32, **sizes: int) -> EPModule:
    """The same with one layer, which has experts."""
    model = tiny_hf(arch, num_hidden_layers=1, **_ONE_LAYER.get(arch, {})).to(dtype)
    return for_npu(model, sizes, kwargs={"input_ids": hf_ids(0, 2, 8)})


@functools.cache
def tiny_for_npu(dtype: torch.dtype = torch.float32, **options: Any) -> EPModule:
    """TinyMoE, whose experts have separate w1 and w3."""
    return for_npu(TinyMoE(**options).to(dtype), {"fsdp": 2, "ep": 2}, (token_ids(0),))


def for_npu(
    model: nn.Module, sizes: dict[str, int], args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None
) -> EPModule:
    """`model` transformed for the NPU; not run."""
    with fake_mesh(**sizes) as mesh:
        return ep_fx.transform(model, mesh, example_inputs=args, example_kwargs=kwargs, target="npu", verify=False)


def calls(graph: ParallelGraph, phase: Phase | None = None) -> Counter[str]:
    """How often each function of the target is called."""
    known = {id(function): name for name, function in (KERNELS | COMPOSITIONS).items()}
    nodes = [node for node in graph if phase is None or info_of(node).phase is phase]
    return Counter(known[id(node.target)] for node in nodes if id(node.target) in known)


def targets(graph: ParallelGraph) -> Counter[str]:
    """How often each operator is called, by its full name."""
    return Counter(str(node.target) for node in graph if node.op == "call_function")


def called(graph: ParallelGraph, name: str) -> list[fx.Node]:
    """The nodes that call the function of the target `name`."""
    return [node for node in graph if node.target is (KERNELS | COMPOSITIONS)[name]]
