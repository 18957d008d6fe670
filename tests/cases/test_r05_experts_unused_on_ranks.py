"""R05, experts that some ranks do not use: a gradient of None, then a hang, or gradients in the wrong parameters.

Sources: pytorch/pytorch#158719 and #171355, DeepSpeed#5066 and #7461, THUDM/slime PR#1010, Automodel PR#2995.
Who packs only parameters that have a gradient packs other buffers on each rank. Here every rank reduces every gradient,
zeros where a rank had no token, and the optimizer steps all experts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, assert_same_sequence, local_mesh
from ep_fx.testing.collective_log import CollectiveLog, Event
from tests.models.listed import InModel, SkipIdle, tokens_of
from tests.oracle import assert_all_gradients_close, gradients_of, relative_error

STEPS = 3


def _model() -> InModel:
    """Top-1; a token's first feature chooses its expert."""
    model = InModel(SkipIdle, top_k=1)
    with torch.no_grad():
        model.inlet.weight.copy_(torch.eye(16))
        model.inlet.bias.zero_()
        model.blocks[0].router.weight.zero_()
        model.blocks[0].router.weight[:, :4] = 20 * torch.eye(4)
    return model


def _tokens(rank: int) -> Tensor:
    """Tokens of a rank, all for the expert of the same number."""
    x = tokens_of(rank)
    x[..., :4] = 3 * torch.eye(4)[rank]
    return x


def _adamw(parameters: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)  # type: ignore[arg-type]


def _run(rank: int, sizes: dict[str, int]) -> tuple[dict[str, float], list[Event], list[float]]:
    """Errors of all weights after three steps, collectives of a backward, step counts."""
    module, eager = ep_fx.transform(_model(), local_mesh(**sizes)), _model()
    ours, theirs = _adamw(module.parameters()), _adamw(eager.parameters())
    for _ in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        with CollectiveLog() as log:
            module(_tokens(rank)).pow(2).mean().backward()
        assert all(p.grad is not None for p in module.parameters())
        for r in range(4):
            (eager(_tokens(r)).pow(2).mean() / 4).backward()
        got = {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]
        assert_all_gradients_close(module.by_original_names(got), gradients_of(eager))
        ours.step()
        theirs.step()
    state = module.full_state_dict()
    errors = {name: relative_error(state[name], p) for name, p in eager.state_dict().items()}
    return errors, log.events, [float(s["step"]) for s in ours.state.values()]


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "ep": 1}, pytest.param({"fsdp": 2, "ep": 2}, marks=pytest.mark.slow)])
def test_r05_every_expert_is_reduced_and_stepped_on_every_rank(ranks: RankPools, sizes: dict[str, int]) -> None:
    runs = ranks(4).run(_run, sizes)
    for errors, _, steps in runs:
        assert max(errors.values()) < 1e-5, errors
        assert set(steps) == {STEPS}
    assert_same_sequence([events for _, events, _ in runs])
