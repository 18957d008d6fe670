"""Ways to apply and to call a style that cannot work, and `transform` of what was made parallel by hand."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module

import ep_fx
from ep_fx import ExpertParallel, ExpertTensorParallel, TensorParallel
from tests.api.bad_inputs import refusals
from tests.models.hand_moe import HandMoE, tokens_for
from tests.models.tiny_moe import SwiGLUExperts, TinyMoE
from tests.styles.nestings import all_data_ranks, own_mesh

Refusals = dict[str, tuple[str, str, int]]


def arguments(rank: int) -> Refusals:
    """What `apply` refuses; nothing of the module may have changed."""
    ep, tp, both = own_mesh(ep=4), own_mesh(tp=4), own_mesh(ep=2, tp=2)
    hybrid, other = own_mesh(fsdp=2, ep=2), own_mesh(data=2, model=2)
    foreign, everything = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep")), all_data_ranks(hybrid)
    twice, whole = ExpertParallel().apply(HandMoE(), ep), HandMoE()
    patched = HandMoE()
    patched.experts.forward = patched.experts.forward  # type: ignore[method-assign]

    def sharded(mesh: Any) -> HandMoE:
        model = HandMoE()
        fully_shard(model.experts, mesh=mesh)
        return model

    cases: dict[str, Callable[[], Any]] = {
        "no mesh": lambda: ExpertParallel().apply(whole, (4,)),  # type: ignore[arg-type]
        "dimension": lambda: ExpertParallel().apply(whole, tp),
        "other names": lambda: ExpertTensorParallel().apply(whole, other),
        "no names": lambda: TensorParallel().apply(whole, init_device_mesh("cpu", (4,))),
        "no module": lambda: ExpertParallel().apply(print, ep),  # type: ignore[arg-type]
        "no experts": lambda: ExpertParallel().apply(nn.Linear(4, 4), ep),
        "two layers": lambda: ExpertParallel().apply(TinyMoE(), ep),
        "6 experts on 4": lambda: ExpertParallel().apply(HandMoE(6), ep),
        "hidden 30 on 4": lambda: TensorParallel().apply(SwiGLUExperts(4, 16, 30), tp),
        "names for tp": lambda: ExpertTensorParallel().apply(whole, both),
        "twice": lambda: ExpertParallel().apply(twice, ep),
        "twice, inside": lambda: ExpertParallel().apply(twice.experts, ep),
        "forward of its own": lambda: ExpertParallel().apply(patched, ep),
        "DTensor": lambda: ExpertParallel().apply(distribute_module(HandMoE(), hybrid["fsdp"]), hybrid),
        "fully_shard over ep": lambda: ExpertParallel().apply(sharded(everything), hybrid),
        "fully_shard on another mesh": lambda: ExpertParallel().apply(sharded(foreign["fsdp"]), hybrid),
    }
    found = refusals(cases)
    assert type(whole.experts.w) is nn.Parameter
    assert "forward" not in whole.__dict__ | whole.experts.__dict__
    return found


def calls(rank: int) -> Refusals:
    """What a styled module refuses when it is called; and what it takes."""
    ep, hybrid = own_mesh(ep=4), own_mesh(fsdp=2, ep=2)
    experts = ExpertParallel().apply(HandMoE(), ep).get_submodule("experts")
    x, counts = torch.eye(8)[[0, 1, 1, 3]], torch.tensor([1, 2, 0, 1])
    divided, unreduced = ExpertParallel().apply(HandMoE(), hybrid), HandMoE()
    fully_shard(divided, mesh=hybrid["fsdp"])
    divided.set_gradient_divide_factor(4.0)  # type: ignore[operator]
    ExpertParallel().apply(unreduced.experts, hybrid)
    fully_shard(unreduced, mesh=hybrid["fsdp"])
    tokens = tokens_for([0, 1, 2, 3])

    def no_gradient() -> Tensor:
        with torch.no_grad():
            return unreduced(tokens)

    cases: dict[str, Callable[[], Any]] = {
        "3-D x": lambda: experts(x.view(1, 4, 8), counts),
        "counts of local experts": lambda: experts(x, counts[:1]),
        "scores": lambda: experts(x, counts, torch.ones(3)),
        "too many": lambda: experts(x, counts * 2),
        "divide factor": lambda: divided(tokens),
        "router not reduced": lambda: unreduced(tokens),
        "router not reduced, no gradient": no_gradient,
        "output is no row": lambda: experts(x, counts, torch.ones(4, 1)),  # these experts want [N]
        "not contiguous": lambda: experts(x.t().contiguous().t(), counts, scores=torch.ones(8)[::2]),
        "counts of floats": lambda: experts(x, counts.float()),
    }
    return refusals(cases)


def transformed(rank: int) -> list[str]:
    """The message of `transform` for each order of applying a style and `fully_shard`."""
    mesh, messages = own_mesh(fsdp=2, ep=2), []
    for style_first in (True, False):
        model = TinyMoE()
        steps: list[Callable[[], Any]] = [
            lambda model=model: [ExpertParallel().apply(b.moe, mesh) for b in model.blocks],  # type: ignore[misc]
            lambda model=model: fully_shard(model, mesh=mesh["fsdp"]),  # type: ignore[misc]
        ]
        for step in steps if style_first else reversed(steps):
            step()
        messages.append(refusals({"transform": lambda model=model: ep_fx.transform(model, mesh)})["transform"][1])
    return messages
