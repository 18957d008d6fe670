"""Ways to call `transform` that cannot work, each a function of no argument; run on every rank."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

import ep_fx
from ep_fx.testing import local_mesh
from tests.models.hand_moe import HandMoE, tokens_for
from tests.models.tiny_moe import TinyMoE


@contextmanager
def group_spy() -> Iterator[list[str]]:
    """The process groups that are made inside, by whatever way."""
    made: list[str] = []
    new_group, flatten = dist.new_group, DeviceMesh._flatten

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return real(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "new_group", spy("new_group", new_group)),
        mock.patch.object(dist.distributed_c10d, "new_group", spy("new_group", new_group)),
        mock.patch.object(DeviceMesh, "_flatten", spy("flatten", flatten)),
    ):
        yield made


def refusals(cases: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[str, str, int]]:
    """What each case raised, and how many process groups it made before; "nothing" where it went through."""
    result: dict[str, tuple[str, str, int]] = {}
    for name, case in cases.items():
        with group_spy() as made:
            try:
                case()
                result[name] = ("nothing", "", len(made))
            except Exception as error:
                result[name] = (type(error).__name__, str(error), len(made))
    return result


class Rebinding(HandMoE):
    """Counts its calls in a buffer, in a way that a graph would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class Storing(HandMoE):
    """Leaves its output on the router."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.router.last = y
        return y


def degrees(rank: int) -> dict[str, tuple[str, str, int]]:
    """Numbers that do not fit: experts, ranks, choices."""
    ep4, plan = local_mesh(fsdp=1, ep=4), {"experts": ep_fx.ExpertParallel()}
    ep3 = init_device_mesh("cpu", (1, 3), mesh_dim_names=("fsdp", "ep"))
    fsdp4, new = local_mesh(fsdp=4), init_device_mesh("cpu", (1, 4), mesh_dim_names=("fsdp", "ep"))
    return refusals(
        {
            "6 experts on ep 4": lambda: ep_fx.transform(HandMoE(6), ep4),
            "4 experts on ep 3": lambda: ep_fx.transform(HandMoE(4), ep3),
            "2 experts on ep 4": lambda: ep_fx.transform(HandMoE(2), ep4),
            "5 of 4 experts": lambda: ep_fx.transform(HandMoE(4, top_k=5), ep4),
            "plan without ep": lambda: ep_fx.transform(HandMoE(4), fsdp4, plan=plan),
            "fits": lambda: ep_fx.transform(HandMoE(4), new),
        }
    )


def arguments(rank: int) -> dict[str, tuple[str, str, int]]:
    """Meshes, plans, models and options that are not what transform takes."""
    mesh, nameless = local_mesh(fsdp=2, ep=2), init_device_mesh("cpu", (4,))
    reverse, unknown, stages = local_mesh(ep=2, fsdp=2), local_mesh(dp=4), local_mesh(pp=2, ep=2)
    tensor_parallel = local_mesh(ep=2, tp=2)
    elsewhere = DeviceMesh("cuda", torch.arange(4), mesh_dim_names=("ep",), _init_backend=False)
    missing = DeviceMesh("npu", torch.arange(4), mesh_dim_names=("ep",), _init_backend=False)
    sharded = HandMoE()
    fully_shard(sharded, mesh=mesh["fsdp"])
    styled, other = ep_fx.ExpertParallel().apply(HandMoE(), mesh), distribute_module(HandMoE(), mesh["ep"])

    def with_(**options: Any) -> Callable[[], Any]:
        return lambda: ep_fx.transform(HandMoE(), mesh, **options)

    return refusals(
        {
            "no names": lambda: ep_fx.transform(HandMoE(), nameless),
            "order": lambda: ep_fx.transform(HandMoE(), reverse),
            "unknown dimension": lambda: ep_fx.transform(HandMoE(), unknown),
            "pp": lambda: ep_fx.transform(HandMoE(), stages),
            "tp, unknown parameter": lambda: ep_fx.transform(HandMoE(), tensor_parallel),
            "tp, hidden 33": lambda: ep_fx.transform(TinyMoE(hidden=33), tensor_parallel),
            "tp, no experts": lambda: ep_fx.transform(torch.nn.Linear(4, 4), local_mesh(fsdp=2, tp=2)),
            "tp, other pipeline": lambda: ep_fx.transform(TinyMoE(), tensor_parallel, pipeline="expert-parallel,fsdp"),
            "tp without ep": lambda: ep_fx.transform(
                TinyMoE(), local_mesh(fsdp=2, tp=2), plan={"*.experts": ep_fx.ExpertTensorParallel()}
            ),
            "two styles": lambda: ep_fx.transform(
                TinyMoE(), tensor_parallel,
                plan={"*.experts": ep_fx.TensorParallel(), "blocks.1.moe.*": ep_fx.ExpertParallel()},
            ),
            "no cuda": lambda: ep_fx.transform(HandMoE(), elsewhere),
            "no npu": lambda: ep_fx.transform(HandMoE(), missing),
            "no mesh": lambda: ep_fx.transform(HandMoE(), (2, 2)),  # type: ignore[arg-type]
            "no module": lambda: ep_fx.transform(print, mesh),  # type: ignore[arg-type]
            "no experts": lambda: ep_fx.transform(torch.nn.Linear(4, 4), mesh),
            "fully_shard": lambda: ep_fx.transform(sharded, mesh),
            "style": lambda: ep_fx.transform(styled, mesh),
            "DTensor": lambda: ep_fx.transform(other, mesh),
            "plan matches nothing": with_(plan={"*.expert": ep_fx.ExpertParallel()}),
            "plan matches no experts": with_(plan={"router": ep_fx.ExpertParallel()}),
            "plan over tp": with_(plan={"experts": ep_fx.ExpertTensorParallel()}),
            "plan of text": with_(plan={"experts": "ep"}),
            "plan as list": with_(plan=["experts"]),
            "expert_reshard": with_(expert_reshard="late"),
            "grad_reduce": with_(grad_reduce="avg"),
            "reshard_after_forward": with_(reshard_after_forward="yes"),
            "units matches nothing": with_(units=["layers.*"]),
            "units as text": with_(units="experts"),
            "unknown option": with_(prefetch=2),
        }
    )


def calls(rank: int) -> dict[str, tuple[str, str, int]]:
    """What is found at the first call, when the model is traced."""
    mesh, tokens = local_mesh(fsdp=2, ep=2), tokens_for([0, 1, 2, 3])
    module = ep_fx.transform(HandMoE(), mesh)
    rebinding, storing = ep_fx.transform(Rebinding(), mesh), ep_fx.transform(Storing(), mesh)
    return refusals(
        {
            "other device": lambda: module(tokens.to("meta")),
            "rebound buffer": lambda: rebinding(tokens),
            "stored tensor": lambda: storing(tokens),
        }
    )
