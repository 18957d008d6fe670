"""One rank's runs of TinyMoE with eager EP and torch's FSDP2, in both orders and with two units for the experts."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx.testing import CollectiveLog, Event
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.requirements.fsdp_ep_runs import LEARNING_RATE, STEPS, make_model
from tests.styles.nestings import all_data_ranks, own_mesh

UNITS = ("moe", "experts")
"""What is sharded over ``fsdp``: the whole MoE, or its experts; all else over ``fsdp x ep``."""
ORDERS = ("EP, then FSDP", "FSDP, then EP")
M4 = {"fsdp": 2, "ep": 2}


def parallel(unit: str, order: str) -> TinyMoE:
    """TinyMoE on FSDP 2 x EP 2."""
    mesh, model = own_mesh(**M4), make_model()
    if order == ORDERS[0]:
        _split(model)
    for block in model.blocks:
        fully_shard(block.get_submodule("moe" if unit == "moe" else "moe.experts"), mesh=mesh["fsdp"])
        fully_shard(block, mesh=all_data_ranks(mesh))
    fully_shard(model, mesh=all_data_ranks(mesh))
    if order == ORDERS[1]:
        _split(model)
    return model


def _split(model: TinyMoE, **sizes: int) -> None:
    for block in model.blocks:
        ep_fx.ExpertParallel().apply(block.get_submodule("moe"), own_mesh(**(sizes or M4)))


class Pass(NamedTuple):
    """One forward and backward: output on this rank, and all gradients whole (None where there is none)."""

    logits: Tensor
    gradients: dict[str, Tensor | None]


class Step(NamedTuple):
    """One step of training: this rank's loss before it, and all parameters whole after it."""

    loss: Tensor
    parameters: dict[str, Tensor]


def whole(tensor: Tensor | None) -> Tensor | None:
    """The full tensor, if there is one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else None if tensor is None else tensor.clone()


def one_pass(module: nn.Module, ids: Tensor) -> Pass:
    """Forward and backward with fresh gradients."""
    module.zero_grad()
    logits = module(ids)
    next_token_loss(logits, ids).backward()
    return Pass(logits.detach(), {n: whole(p.grad) for n, p in module.named_parameters()})


def training(rank: int, unit: str, order: str) -> tuple[Pass, Pass, list[Step]]:
    """A pass with tokens of the rank's own, one with the same tokens on all ranks, and three steps."""
    module, ids = parallel(unit, order), token_ids(rank)
    distinct, same = one_pass(module, ids), one_pass(module, token_ids(0))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, foreach=False)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = next_token_loss(module(ids), ids)
        loss.backward()
        optimizer.step()
        parameters = {n: whole(p.detach()) for n, p in module.named_parameters()}
        steps.append(Step(loss.detach(), parameters))  # type: ignore[arg-type]
    return distinct, same, steps


def without_fsdp(rank: int) -> Pass:
    """EP over all four ranks; what the style was not given (embedding, norms, head) is averaged here."""
    module = make_model()
    _split(module, ep=4)
    found = one_pass(module, token_ids(rank))
    for name, gradient in found.gradients.items():
        if ".moe." not in name:
            assert gradient is not None
            dist.all_reduce(gradient.div_(4))
    return found


def accumulated(rank: int, unit: str, sync: bool) -> dict[str, Tensor | None]:
    """Gradients of two micro-batches, the first with or without a reduction of its own."""
    module: Any = parallel(unit, ORDERS[0])
    for index in range(2):
        module.set_requires_gradient_sync(sync or index == 1)
        ids = token_ids(rank + 10 * index)
        next_token_loss(module(ids), ids).backward()
    return {n: whole(p.grad) for n, p in module.named_parameters()}


class Recorded(NamedTuple):
    """What happened to the experts and their tokens, in the order in which it ran, and every collective."""

    labels: list[str]
    events: list[Event]


def recorded(rank: int, unit: str, order: str) -> Recorded:
    """The second step of a run: forward, then backward."""
    module, ids = parallel(unit, order), token_ids(rank)
    next_token_loss(module(ids), ids).backward()
    with _spies() as labels, CollectiveLog() as log:
        loss = next_token_loss(module(ids), ids)
        labels.append("backward")
        loss.backward()
    return Recorded(labels, log.events)


@contextmanager
def _spies() -> Iterator[list[str]]:
    """Notes when FSDP makes w1 of the experts whole and when it frees it, and every exchange."""
    labels: list[str] = []

    def spy(owner: Any, name: str, label: str) -> Any:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(args[0], FSDPParam) or args[0]._module_info.param_name == "w1":
                labels.append(label)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, noted)

    with (
        spy(FSDPParam, "to_unsharded", "unshard"),
        spy(FSDPParam, "to_sharded", "reshard"),
        spy(dist, "all_to_all_single", "exchange"),
    ):
        yield labels
