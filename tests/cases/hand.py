"""HandMoE on local ranks, whatever their device: what a run gave, to be compared with numbers known by hand."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import CollectiveLog, Event, local_mesh
from tests.models.hand_moe import HandMoE, tokens_for

M4: dict[str, int] = {"fsdp": 2, "ep": 2}
M4E: dict[str, int] = {"fsdp": 1, "ep": 4}
M8H: dict[str, int] = {"replicate": 2, "fsdp": 2, "ep": 2}
Routing = Sequence[int]


class HandRun(NamedTuple):
    """What one rank saw.

    Args:
        sums: for each micro-batch the sum over features of each output token.
        requires_grad: whether each output carries a gradient.
        gradient: full gradient of the experts' weight.
        events: collectives of the backwards.
        programs: captures that were made.
    """

    sums: list[list[float]]
    requires_grad: list[bool]
    gradient: Tensor
    events: list[Event]
    programs: int


def hand_run(
    rank: int,
    sizes: Mapping[str, int],
    microbatches: Sequence[Sequence[Routing]],
    loss: Literal["mean", "sum"] = "mean",
    make_model: Callable[[], nn.Module] = HandMoE,
    options: Mapping[str, Any] | None = None,
) -> HandRun:
    """All forwards, then all backwards, in the same order.

    Args:
        sizes: mesh.
        microbatches: for each micro-batch the experts of each rank's tokens.
        loss: over the local tokens' sums, divided by the number of micro-batches.
        options: of `ep_fx.transform`.
    """
    mesh = local_mesh(**sizes)
    module = ep_fx.transform(make_model(), mesh, **(options or {}))
    outputs = [module(tokens_for(routings[rank]).to(mesh.device_type)) for routings in microbatches]
    losses = [getattr(y.sum(-1), loss)() / len(outputs) for y in outputs]
    with CollectiveLog() as log:
        for value in losses:
            value.backward()
    gradient = next(p.grad for name, p in module.named_parameters() if name.endswith("experts.w"))
    assert gradient is not None
    whole = gradient.full_tensor().cpu()  # type: ignore[attr-defined]
    sums, flags = [y.sum(-1).tolist() for y in outputs], [y.requires_grad for y in outputs]
    return HandRun(sums, flags, whole, log.events, len(module.programs))


def assert_shares(runs: Sequence[HandRun], gradient: Tensor, tol: float = 1e-6) -> None:
    """Every rank has this full gradient."""
    for rank, run in enumerate(runs):
        shares = run.gradient.diagonal(dim1=0, dim2=1).mean(0).tolist()
        assert torch.allclose(run.gradient, gradient, atol=tol, rtol=0), f"rank {rank} has the shares {shares}"
