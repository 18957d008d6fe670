"""API-2: the eager style on experts of transformers, inside an unmodified model that FSDP shards: all gradients."""
from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ep_fx
from ep_fx.styles.forms import TRANSFORMERS
from ep_fx.testing import RankPools
from tests.models.hf import ARCHITECTURES, hf_ids, tiny_hf
from tests.models.tiny_moe import next_token_loss
from tests.oracle import assert_all_gradients_close, oracle, relative_error
from tests.styles.model_runs import M4, ORDERS, Pass, whole
from tests.styles.nestings import all_data_ranks, own_mesh

FIRST = [
    ("mixtral", ORDERS[0], "experts"),
    ("gpt_oss", ORDERS[1], "experts"),
    ("qwen2_moe", ORDERS[1], "moe"),  # with a parameter [1, 64], of which a rank has nothing
]
REST = [way for way in product(ARCHITECTURES, ORDERS, ["experts"]) if way not in FIRST]


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a model of transformers."""
    return [module for module in model.modules() if TRANSFORMERS.accepts(module)]


def run(rank: int, arch: str, order: str, unit: str) -> Pass:
    """Forward and backward: experts (or the whole MoE) split over ep and sharded over fsdp, all else over both."""
    model, mesh = tiny_hf(arch), own_mesh(**M4)
    parts = experts_of(model) if unit == "experts" else [layer.mlp for layer in model.model.layers]
    if order == ORDERS[0]:
        _split(parts, mesh)
    for part in parts:
        fully_shard(part, mesh=mesh["fsdp"])
    fully_shard(model, mesh=all_data_ranks(mesh))
    if order == ORDERS[1]:
        _split(parts, mesh)
    ids = hf_ids(rank)
    logits = model(input_ids=ids).logits
    next_token_loss(logits, ids).backward()
    return Pass(logits.detach(), {n: whole(p.grad) for n, p in model.named_parameters()})


def _split(parts: Sequence[nn.Module], mesh: Any) -> None:
    for part in parts:
        ep_fx.ExpertParallel().apply(part, mesh)


class _Logits(nn.Module):
    """The model as a function of ids, under its own parameter names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


@pytest.mark.parametrize(
    ("arch", "order", "unit"),
    [*FIRST, *(pytest.param(*way, marks=pytest.mark.slow) for way in REST)],
)
def test_experts_of_transformers(ranks: RankPools, arch: str, order: str, unit: str) -> None:
    batches = [(hf_ids(rank),) for rank in range(4)]
    want = oracle(functools.partial(_make, arch), batches, next_token_loss, batches)
    gradients = {name.removeprefix("model."): g for name, g in want.gradients.items()}
    for rank, got in enumerate(ranks(4).run(run, arch, order, unit)):
        assert relative_error(got.logits, want.outputs[rank]) <= 1e-5
        assert sum(".experts." in name for name in gradients) >= 2
        assert_all_gradients_close({n: g for n, g in got.gradients.items() if n in gradients}, gradients)


def _make(arch: str) -> nn.Module:
    return _Logits(tiny_hf(arch))


def test_tensor_parallel_needs_parameters_that_it_knows(ranks: RankPools) -> None:
    for message in ranks(4).run(_refused):
        assert "gate_up_proj" in message
        assert "w1, w3 [E, hidden, dim] and w2" in message


def _refused(rank: int) -> str:
    with pytest.raises(ValueError, match="tp") as error:
        ep_fx.TensorParallel().apply(experts_of(tiny_hf("mixtral"))[0], own_mesh(tp=4))
    return str(error.value)


def test_a_copy_runs_on_its_own_parameters(ranks: RankPools) -> None:
    assert all(ranks(4).run(_copied))


def _copied(rank: int) -> bool:
    experts = ep_fx.ExpertParallel().apply(ep_fx.nn.GroupedExperts(16, 32, 4), own_mesh(ep=4))
    twin = copy.deepcopy(experts)
    call = (torch.randn(4, 16), torch.tensor([1, 1, 1, 1]))
    same = torch.equal(experts(*call), twin(*call))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.zero_()
    return same and bool(twin(*call).any()) and not bool(experts(*call).any())
