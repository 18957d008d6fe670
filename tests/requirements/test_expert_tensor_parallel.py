"""API-2 inside `transform`: experts over ep and tp, against the whole model in one process.

Ranks along tp get the same tokens, data ranks different ones; outputs, all gradients, the norm, AdamW, state dicts.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ep_fx
from ep_fx.testing import RankPools
from tests.models.tiny_moe import next_token_loss
from tests.models.titan import HAS_TITAN
from tests.oracle import assert_all_gradients_close, oracle, relative_error
from tests.requirements.expert_tensor_parallel_runs import (
    LEARNING_RATE,
    MODELS,
    STEPS,
    Run,
    Sizes,
    batch,
    checked,
    checkpointed,
    logits,
    run,
)

NEEDS_TITAN = pytest.mark.skipif(not HAS_TITAN, reason="torchtitan is not installed; `make env` does it")
TP = ep_fx.TensorParallel()
ETP = ep_fx.ExpertTensorParallel()
FAST: list[tuple[Sizes, str, Any]] = [
    ({"ep": 2, "tp": 2}, "scores before", None),
    ({"ep": 2, "tp": 2}, "scores after", {"*.experts": ETP}),
    ({"ep": 2, "tp": 2}, "mixtral", None),
    ({"ep": 2, "tp": 2}, "gpt_oss", {"*.experts": ETP}),
    ({"fsdp": 2, "tp": 2}, "scores after, by the block", {"*.experts": TP}),
    ({"ep": 2, "tp": 2}, "explicit", {"experts": TP}),
]
SLOW: list[tuple[Sizes, str, Any]] = [
    ({"fsdp": 2, "ep": 2, "tp": 2}, "scores after, by the block", None),
    ({"fsdp": 2, "ep": 2, "tp": 2}, "scores before", {"*.experts": TP}),
    ({"fsdp": 2, "ep": 2, "tp": 2}, "mixtral", None),
    ({"fsdp": 2, "ep": 2, "tp": 2}, "gpt_oss", None),
    ({"replicate": 2, "fsdp": 1, "ep": 2, "tp": 2}, "deepseek_v3", None),
    ({"fsdp": 3, "ep": 1, "tp": 2}, "scores after", None),
    ({"fsdp": 2, "ep": 4, "tp": 1}, "scores after", None),
    ({"tp": 4}, "mixtral", None),
]


def check(runs: list[Run], model: str, steps: int) -> None:
    """Every rank against the oracle."""
    ranks = max(run.index for run in runs) + 1
    batches = [(batch(model, index),) for index in range(ranks)]

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = MODELS[model]()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return logits(self.model, ids)

    want = oracle(Logits, batches, next_token_loss, batches)
    gradients = {name: want.gradients[f"model.{name}"] for name, _ in MODELS[model]().named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    whole = MODELS[model]()
    start = {name: p.detach().clone() for name, p in whole.named_parameters()}
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([next_token_loss(logits(whole, ids), ids) for (ids,) in batches]).mean().backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
    for got in runs:
        assert got.broken == ()
        assert all(torch.equal(got.parameters[name], start[name]) for name in start)
        assert relative_error(got.logits, want.outputs[got.index]) <= 1e-5
        assert_all_gradients_close(got.gradients, gradients)
        assert relative_error(got.norm, norm) <= 1e-5
        # AdamW divides by the size of a gradient, so that rounding in the smallest entries is as large as their step
        assert_all_gradients_close(got.trained, dict(whole.named_parameters()), tol=2e-3)
        assert all(torch.equal(got.reloaded[name], got.trained[name]) for name in start)


def name_of(case: Any) -> str:
    return " ".join(f"{k}{v}" for k, v in case.items()) if isinstance(case, dict) and "tp" in case else str(case)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("sizes", "model", "plan"), FAST, ids=name_of)
def test_outputs_gradients_steps_and_state(ranks: RankPools, sizes: Sizes, model: str, plan: Any) -> None:
    check(ranks(4).run(run, sizes, model, plan, STEPS, timeout=110), model, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sizes", "model", "plan"), SLOW, ids=name_of)
def test_on_more_meshes(ranks: RankPools, sizes: Sizes, model: str, plan: Any) -> None:
    world = torch.tensor(list(sizes.values())).prod().item()
    check(ranks(int(world)).run(run, sizes, model, plan, STEPS, timeout=280), model, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["a list and a loop", pytest.param("torchtitan", marks=NEEDS_TITAN)])
def test_other_forms_of_experts(ranks: RankPools, model: str) -> None:
    assert ranks(4).run(checked, {"ep": 2, "tp": 2}, model, timeout=150) == [([], 2)] * 4


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    ("sizes", "other"),
    [({"ep": 2, "tp": 2}, {"fsdp": 4}), ({"fsdp": 4}, {"ep": 2, "tp": 2}), ({"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2})],
    ids=name_of,
)
def test_a_checkpoint_moves_between_meshes(
    ranks: RankPools, sizes: Sizes, other: Sizes, model: str, tmp_path: Path
) -> None:
    want = dict(MODELS[model]().named_parameters())
    for got in ranks(4).run(checkpointed, sizes, other, model, str(tmp_path), timeout=150):
        assert [name for name in want if not torch.equal(got[name], want[name])] == []
