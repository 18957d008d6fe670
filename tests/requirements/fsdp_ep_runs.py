"""One rank's runs of TinyMoE on (fsdp 2, ep 2) and without FSDP, for the requirements of FSDP + EP."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx import EPModule
from ep_fx.cost.liveness import live_unsharded_bytes, peak
from ep_fx.graph.roles import target_name
from ep_fx.testing import CollectiveLog, Event, local_mesh
from ep_fx.verify.reduction_table import ReductionRow, reduction_table
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids

M4 = {"fsdp": 2, "ep": 2}
LEARNING_RATE = 0.5
STEPS = 3


def make_model() -> TinyMoE:
    """Two blocks with a shared expert."""
    return TinyMoE(shared=True, grouped=True)


class Pass(NamedTuple):
    """One forward and backward: output on this rank, and all gradients whole (None where there is none)."""

    logits: Tensor
    gradients: dict[str, Tensor | None]


class Step(NamedTuple):
    """One step of training: this rank's loss before it, and all parameters whole after it."""

    loss: Tensor
    parameters: dict[str, Tensor]


class Recorded(NamedTuple):
    """What ran, read at the dispatcher, beside what the graph says.

    Args:
        events: the run's operators of the dialect and collectives.
        live: bytes of gathered parameters after each of the dialect's operators.
        predicted: the same from the graph.
        peaks: the most of both.
        reductions: what the graph says about each gradient's sums.
    """

    events: list[Event]
    live: list[tuple[str, int]]
    predicted: list[tuple[str, int]]
    peaks: tuple[int, int]
    reductions: tuple[ReductionRow, ...]


def whole(tensor: Any) -> Tensor:
    """The full tensor of a DTensor."""
    result: Tensor = tensor.detach().full_tensor()
    return result


def one_pass(module: nn.Module, ids: Tensor) -> Pass:
    """Forward and backward with fresh gradients."""
    module.zero_grad()
    logits = module(ids)
    next_token_loss(logits, ids).backward()
    gradients = {n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()}
    return Pass(logits.detach(), gradients)


def training(rank: int) -> tuple[Pass, Pass, list[Step]]:
    """A pass with tokens of the rank's own, one with the same tokens on all ranks, and three steps."""
    module, ids = ep_fx.transform(make_model(), local_mesh(**M4)), token_ids(rank)
    distinct, same = one_pass(module, ids), one_pass(module, token_ids(0))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = next_token_loss(module(ids), ids)
        loss.backward()
        optimizer.step()
        steps.append(Step(loss.detach(), {n: whole(p) for n, p in module.named_parameters()}))
    return distinct, same, steps


def without_fsdp(rank: int) -> Pass:
    """The same model with EP and plain replicas."""
    return one_pass(ep_fx.transform(make_model(), local_mesh(replicate=2, ep=2)), token_ids(rank))


def recorded(rank: int, policy: str) -> Recorded:
    """A run under the log."""
    module = ep_fx.transform(make_model(), local_mesh(**M4), expert_reshard=policy)  # type: ignore[arg-type]
    ids = token_ids(rank)
    with CollectiveLog(dialect=True) as log:
        next_token_loss(module(ids), ids).backward()
    live = [(e.op, e.live_bytes) for e in log.events if not e.is_collective]
    return Recorded(
        log.events, live, _predicted(module), (log.peak_bytes, peak(module.graph).bytes), reduction_table(module.graph)
    )


def _predicted(module: EPModule) -> list[tuple[str, int]]:
    after = live_unsharded_bytes(module.graph)
    return [(target_name(node), size) for node, size in after if target_name(node).startswith("ep_fx::")]
