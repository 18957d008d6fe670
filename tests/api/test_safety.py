"""What a user may do between forward and backward, or with a module, that would be wrong without a word."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.models.tiny_moe import TinyMoE
from tests.oracle import assert_all_gradients_close, gradients_of


class Growing(nn.Module):
    """A buffer that every forward changes in place and then reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.scale = nn.Buffer(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(2)
        return torch.tanh(x * self.w) * self.scale


class Checkpointed(nn.Module):
    """TinyMoE under activation checkpointing of either kind."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = TinyMoE(), reentrant
        self.last = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.inner.embedding(ids)
        for block in self.inner.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _in_flight(rank: int) -> dict[str, str]:
    mesh = local_mesh(fsdp=2, ep=2)
    module = ep_fx.transform(TinyMoE(), mesh)
    ids = torch.arange(8).remainder(7).view(2, 4)
    found = {}
    loss = module(ids).sum()
    ids.fill_(0)
    found["input"] = _error(loss.backward)
    loss = module(ids).sum()
    with torch.no_grad():
        module.head.weight.mul_(2)  # type: ignore[union-attr, operator]
    found["weight"] = _error(loss.backward)
    y = ep_fx.transform(Growing(), mesh, plan={})(torch.ones(2, 4))
    y.mul_(2)
    found["nothing wrong"] = _error(y.sum().backward)
    return found


def test_what_backward_reads_must_not_change(ranks: RankPools) -> None:
    """Autograd refuses this for its own saved tensors; refilling an input buffer is the usual way to do it."""
    for found in ranks(4).run(_in_flight):
        assert "input args[0]" in found["input"] or "input args_0_" in found["input"], found
        assert "parameter head.weight was written in place" in found["weight"], found
        assert found["nothing wrong"] == "", found


def _scaled(rank: int) -> list[float]:
    """Gradient of w for x = 1 at w = 0, which is the scale that this micro-batch saw, times 2 rows."""
    model = Growing()
    nn.init.zeros_(model.w)
    module = ep_fx.transform(model, local_mesh(fsdp=2, ep=1), plan={})
    losses = [module(torch.ones(2, 4)).sum() for _ in range(2)]
    found = []
    for loss in losses:
        module.zero_grad()
        loss.backward()
        found.append(float(module.w.grad.full_tensor()[0]))  # type: ignore[union-attr, operator]
    return found


def test_each_micro_batch_keeps_the_buffer_that_it_saw(ranks: RankPools) -> None:
    assert ranks(2).run(_scaled) == [[4.0, 8.0]] * 2


def _misuse(rank: int) -> dict[str, str]:
    mesh = local_mesh(fsdp=2, ep=2)
    model = TinyMoE()
    module = ep_fx.transform(model, mesh)
    ids = torch.zeros(2, 4, dtype=torch.long)
    found = {"twice": _error(lambda: ep_fx.transform(model, mesh))}
    found["copy"] = _error(lambda: copy.deepcopy(module))
    found["pickle"] = _error(lambda: pickle.dumps(module))
    found["examples"] = _error(lambda: ep_fx.transform(TinyMoE(), mesh, example_inputs=ids))  # type: ignore[arg-type]
    found["dtype"] = _error(lambda: module.to(torch.bfloat16)(ids))
    odd = "sum" if rank == 1 else "mean"
    found["option"] = _error(lambda: ep_fx.transform(TinyMoE(), mesh, grad_reduce=odd))  # type: ignore[arg-type]
    wrong = "late" if rank == 1 else "strict"
    found["one bad option"] = _error(lambda: ep_fx.transform(TinyMoE(), mesh, expert_reshard=wrong))  # type: ignore[arg-type]
    return found


def test_misuse_is_told_on_every_rank(ranks: RankPools) -> None:
    for found in ranks(4).run(_misuse, timeout=40):
        assert "was transformed before" in found["twice"]
        assert "state_dict()" in found["copy"]
        assert "state_dict()" in found["pickle"]
        assert "example_inputs must be a tuple" in found["examples"]
        assert "bfloat16" in found["dtype"]
        assert "torch.float32" in found["dtype"]
        assert "rank 1: options" in found["option"]
        assert "rank 1: ValueError: expert_reshard" in found["one bad option"]


def _checkpointed(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = ep_fx.transform(Checkpointed(True), local_mesh(fsdp=2, ep=2))
    module(torch.arange(8).remainder(7).view(2, 4)).pow(2).mean().backward()
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]


def test_reentrant_checkpoints_of_the_model_are_taken_out(ranks: RankPools) -> None:
    """The other kind is in tests/cases/test_r06_recompute_keeps_routes.py."""
    torch.manual_seed(0)
    eager = Checkpointed(False)
    eager(torch.arange(8).remainder(7).view(2, 4)).pow(2).mean().backward()
    for gradients in ranks(4).run(_checkpointed):
        assert_all_gradients_close(gradients, gradients_of(eager))
