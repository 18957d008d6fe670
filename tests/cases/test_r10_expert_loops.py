"""R10, a loop over experts that depends on data cannot be captured.

Sources: huggingface/transformers PR#40114, deepseek-ai/DeepSeek-V3#374, PrimeIntellect-ai/prime-rl#996,
pytorch/torchtitan PR#2369.
Bare fx raises a TraceError, export a data-dependent guard error. Here such a loop is recognised and never traced; where
it is not recognised, the refusal names the module, the source line and what would be accepted.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.listed import (
    PROVABLE,
    REFUSED,
    InModel,
    Listed,
    MaskOfChoices,
    Mixture,
    OnlyHit,
    SkipIdle,
    SplitSorted,
    Unequal,
    tokens_of,
)
from tests.oracle import assert_all_gradients_close, gradients_of, relative_error

LOOPS = (OnlyHit, SkipIdle, SplitSorted, pytest.param(MaskOfChoices, marks=pytest.mark.slow))
ROUTINGS = 5


def _steer(model: InModel, routing: int) -> None:
    """Another routing: from spread to all tokens on one expert, so that experts stay without a token."""
    with torch.no_grad():
        for block in model.blocks:
            block.router.weight.copy_(torch.randn(block.router.weight.shape) if routing else torch.ones(4, 16))
            if routing == 1:
                block.router.weight[2:] = -3.0


def _five_routings(rank: int, block: type[Listed]) -> tuple[list[float], int]:
    """Worst error of each routing against the eager model, and captures."""
    mesh, worst = local_mesh(**M4), []
    module = ep_fx.transform(InModel(block), mesh)
    for routing in range(ROUTINGS):
        eager = InModel(block)
        torch.manual_seed(routing)
        _steer(eager, routing)
        module.load_state_dict(eager.state_dict())
        module.zero_grad()
        x = tokens_of(rank, length=4 + routing)
        y = module(x)
        worst.append(_error(eager, module, x, y))
    return worst, len(module.programs)


def _error(eager: InModel, module: ep_fx.EPModule, x: Tensor, y: Tensor) -> float:
    everyone = [tokens_of(r, length=x.shape[1]) for r in range(4)]
    y.sum().backward()
    for tokens in everyone:
        (eager(tokens).sum() / 4).backward()
    got = {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]
    assert_all_gradients_close(module.by_original_names(got), gradients_of(eager))
    return relative_error(y, eager(x))


@pytest.mark.parametrize("block", LOOPS)
def test_r10_a_recognised_loop_equals_eager_on_five_routings(ranks: RankPools, block: type[Listed]) -> None:
    for worst, captures in ranks(4).run(_five_routings, block):
        assert max(worst) < 1e-5
        assert captures == 1


def _refusals(rank: int) -> dict[str, str]:
    mesh, found = local_mesh(**M4), {}
    for block in REFUSED:
        for options in ({}, {"plan": {"blocks.*.experts": ep_fx.ExpertParallel()}}):
            model = InModel(block)
            before = list(model.state_dict())
            try:
                ep_fx.transform(model, mesh, **options)  # type: ignore[arg-type]
            except ValueError as error:
                found[f"{block.__name__} {list(options)}"] = str(error)
            assert list(model.state_dict()) == before
    return found


def test_r10_what_is_not_recognised_is_refused_with_path_line_and_forms(ranks: RankPools) -> None:
    for found in ranks(4).run(_refusals):
        assert len(found) == 2 * len(REFUSED)
        for text in found.values():
            assert "blocks.0.experts (" in text
            assert "tests/models/listed.py:" in text
            assert "ep_fx.register_experts(cls, fn)" in text
            assert "Accepted forms: [" in text


def _unsplit(rank: int, blocks: list[type[Listed]]) -> dict[str, str]:
    """Without a dimension ``ep`` nothing need be recognised: what cannot be traced is refused in our words."""
    mesh, found = local_mesh(fsdp=4), {}
    for block in blocks:
        module = ep_fx.transform(InModel(block), mesh)
        eager, x = InModel(block), tokens_of(rank)
        try:
            error = relative_error(module(x), eager(x))
            found[block.__name__] = "equal" if error < 1e-5 else f"wrong by {error}"
        except ValueError as error:
            found[block.__name__] = str(error)
    return found


@pytest.mark.parametrize(
    "blocks", [[Mixture, Unequal], pytest.param([*REFUSED], marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_r10_without_ep_a_loop_is_traced_rightly_or_refused(ranks: RankPools, blocks: list[type[Listed]]) -> None:
    for found in ranks(4).run(_unsplit, blocks):
        for name, text in found.items():
            assert text == "equal" or ("blocks.0" in text and "listed.py:" in text), f"{name}: {text}"
        assert found["Mixture"] == "equal"
        assert "accepted forms" in found["Unequal"]


def _modes(rank: int) -> list[str]:
    mesh, reports = local_mesh(**M4), []
    for block in PROVABLE:
        for training in (True, False):
            model = InModel(block).train(training)
            reports.append(str(ep_fx.check(copy.deepcopy(model), mesh, tokens_of(rank), tolerance=1e-5)))
    return reports


@pytest.mark.slow
def test_every_provable_block_in_both_modes(ranks: RankPools) -> None:
    for reports in ranks(4).run(_modes, timeout=120):
        assert all("0 beyond" in report for report in reports), reports
