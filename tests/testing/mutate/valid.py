"""Valid graphs in number: architectures, meshes, policies, and the graph before, between and after the passes.

On a fake process group, in one process; no rule may complain about any of them.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ep_fx
from ep_fx import api
from ep_fx.graph import ParallelGraph
from ep_fx.testing.fake import fake_world
from ep_fx.verify import Report, verify
from tests.models.hand_moe import HandMoE, tokens_for
from tests.models.hf import hf_ids, tiny_hf
from tests.models.tiny_moe import TinyMoE, token_ids
from tests.testing.mutate.subjects import Counting, frozen

MESHES: list[dict[str, int]] = [
    {"fsdp": 2, "ep": 2}, {"ep": 4}, {"fsdp": 4}, {"replicate": 2, "fsdp": 2}, {"fsdp": 3}, {"replicate": 2, "ep": 2},
    {"fsdp": 1, "ep": 1}, {"replicate": 2, "fsdp": 3, "ep": 2},
    {"fsdp": 2, "ep": 2, "tp": 2},
]
POLICIES: list[dict[str, Any]] = [
    {}, {"expert_reshard": "early"}, {"reshard_after_forward": False},
    {"grad_reduce": "sum", "expert_reshard": "early"},
]
_Model = tuple[Callable[[], nn.Module], tuple[Any, ...]]
MODELS: dict[str, _Model] = {
    "tiny": (lambda: TinyMoE(blocks=1, shared=True), (token_ids(0),)),
    "hand": (HandMoE, (tokens_for([0, 1, 2, 3, 3]),)),
    "grouped": (lambda: TinyMoE(blocks=1, grouped=True, tied=True), (token_ids(0),)),
    "counting": (Counting, (token_ids(0),)),
    "frozen": (frozen, (token_ids(0),)),
    "scored": (lambda: TinyMoE(blocks=1, scores="keyword", score="before"), (token_ids(0),)),
    "odd": (lambda: TinyMoE(blocks=1, dim=14, hidden=9, vocabulary=31), (token_ids(0, vocabulary=31),)),
    "mixtral": (lambda: tiny_hf("mixtral", num_hidden_layers=1), (hf_ids(0),)),
    "gpt_oss": (lambda: tiny_hf("gpt_oss", num_hidden_layers=1), (hf_ids(0),)),
    "deepseek_v3": (lambda: tiny_hf("deepseek_v3", num_hidden_layers=2), (hf_ids(0),)),
}


def alarms(count: int) -> tuple[int, list[str]]:
    """How many of up to `count` graphs were checked, and what the rules said against those that they reject."""
    checked, wrong = 0, []
    for name, report in itertools.islice(_reports(), count):
        checked += 1
        if not report.ok:
            wrong.append(f"{name}: {report.explain()}")
    return checked, wrong


def _reports() -> Iterator[tuple[str, Report]]:
    """Every model on a mesh under a policy; neighbours in the list differ in all three."""
    pairs = list(itertools.product(MESHES, POLICIES))
    for step in range(len(pairs)):
        for place, (name, model) in enumerate(MODELS.items()):
            mesh, policy = pairs[(step * 5 + place * 3) % len(pairs)]
            if "tp" in mesh and name in ("hand", "odd"):  # these experts cannot be cut
                policy = {**policy, "plan": {"*experts": ep_fx.ExpertParallel()}}
            for stage, report in _stages(model, mesh, policy):
                yield f"{name} on {mesh}, {policy}, {stage}", report


def _stages(model: _Model, sizes: dict[str, int], policy: dict[str, Any]) -> list[tuple[str, Report]]:
    """The graph after capture and after each pass, as checked by a transform, and the types of the last one."""
    found: list[tuple[str, Report]] = []

    def check(graph: ParallelGraph) -> Report:
        report = verify(graph)
        found.append((f"after {graph.provides[-1] if graph.provides else 'capture'}", report))
        return report

    make, inputs = model
    world = 1
    for size in sizes.values():
        world *= size
    with fake_world(world), mock.patch.object(api, "_verified", check):
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        module = ep_fx.transform(make(), mesh, example_inputs=inputs, **policy)
    found[-1] = ("after all passes", verify(module.graph, types=True))
    return found
