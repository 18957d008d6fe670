"""R27, frozen and trainable parameters mixed.

Sources: pytorch/pytorch#117510 and #186998, NVIDIA-NeMo/Automodel PR#1252 and #547, axolotl-ai-cloud/axolotl PR#3977,
mindspore-ai/hyper-parallel#328.
Backward reshards what it never gathered; sharding makes everything trainable; frozen units are reduced all the same;
no gradient flows through them; or what is thawed later keeps its old way. Here flags stay, what is frozen has neither
gradient nor reduction, what lies in front of the first trained parameter is not gathered in backward, and thawing is
another capture.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import ep_fx
from ep_fx.graph import Phase, Role
from ep_fx.testing import CollectiveLog, Event, RankPools, assert_same_sequence, local_mesh
from tests.cases.hand import M4
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, oracle

IDS = [(token_ids(rank),) for rank in range(4)]
LAST = "blocks.1.moe.experts"


def _freeze(model: TinyMoE, frozen: Callable[[str], bool]) -> TinyMoE:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(name))
    return model


def without_experts() -> TinyMoE:
    """One block, experts frozen."""
    return _freeze(TinyMoE(blocks=1, grouped=True), lambda name: "experts" in name)


def only_last_experts() -> TinyMoE:
    """Two blocks, all frozen but the experts of the second."""
    return _freeze(TinyMoE(blocks=2, grouped=True), lambda name: not name.startswith(LAST))


def _gradients(module: ep_fx.EPModule) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in module.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def frozen(rank: int, make: Callable[[], TinyMoE], thaw: bool) -> dict[str, Any]:
    """A backward with what is frozen, and one more with everything trained."""
    module, ids = ep_fx.transform(make(), local_mesh(**M4)), token_ids(rank)
    flags = {n for n, p in module.named_parameters() if p.requires_grad}
    with CollectiveLog(dialect=True) as log:
        next_token_loss(module(ids), ids).backward()
    found: dict[str, Any] = {
        "trained": flags,
        "frozen": _gradients(module),
        "reduced": sum(len(e.shapes) for e in log.of("reduce_grad")),
        "gathered in backward": sum(
            len(n.args[0]) for n in module.graph.nodes(Role.UNSHARD, Phase.BACKWARD)  # type: ignore[arg-type]
        ),
        "left": log.live_bytes,
        "events": log.events,
    }
    if thaw:
        module.zero_grad()
        module.requires_grad_(True)
        next_token_loss(module(ids), ids).backward()
        found |= {"thawed": _gradients(module), "captures": len(module.programs)}
    return found


def _same_on_all(runs: list[dict[str, Any]]) -> None:
    logs: list[list[Event]] = [found["events"] for found in runs]
    assert_same_sequence(logs)


def test_r27_frozen_experts_have_no_gradient_and_no_reduction_and_can_be_trained_again(ranks: RankPools) -> None:
    want = oracle(lambda: TinyMoE(blocks=1, grouped=True), IDS, next_token_loss, IDS).gradients
    runs = ranks(4).run(frozen, without_experts, True)
    _same_on_all(runs)
    for found in runs:
        assert found["trained"] == {n for n in want if "experts" not in n}
        assert_all_gradients_close(found["frozen"], {n: want[n] for n in found["trained"]})
        assert found["reduced"] == len(want) - 3
        assert found["left"] == 0
        assert_all_gradients_close(found["thawed"], want)
        assert found["captures"] == 2


def test_r27_where_only_the_last_experts_are_trained_backward_stops_at_them(ranks: RankPools) -> None:
    want = oracle(only_last_experts, IDS, next_token_loss, IDS).gradients
    runs = ranks(4).run(frozen, only_last_experts, False)
    _same_on_all(runs)
    for found in runs:
        assert found["trained"] == {f"{LAST}.w{i}" for i in (1, 2, 3)}
        assert_all_gradients_close(found["frozen"], want)
        assert found["reduced"] == 3
        assert found["gathered in backward"] <= 3 + 2, "the experts, the head and the norm before it"
        assert found["left"] == 0


