"""Ranks that are about to do different things all stop, with one message that names the first difference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.models.tiny_moe import TinyMoE


class TwoLayers(nn.Module):
    """Two layers of the same size, in an order that may differ by rank."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(8, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("a")(x) + 2 * self.get_submodule("b")(x)


def _message(rank: int, case: str) -> tuple[str, str]:
    mesh = local_mesh(fsdp=2, ep=2)
    odd = rank == 2
    try:
        if case == "order":
            ep_fx.transform(TwoLayers(("b", "a") if odd else ("a", "b")), mesh, plan={})
        elif case == "frozen":
            model = TwoLayers(("a", "b"))
            model.get_submodule("a").requires_grad_(not odd)
            ep_fx.transform(model, mesh, plan={})
        elif case == "only one rank is wrong":
            ep_fx.transform(TinyMoE(num_experts=3 if odd else 4), mesh)
        elif case == "one capture fails":
            example = (torch.zeros(2, 8, device="meta" if odd else "cpu"),)
            ep_fx.transform(TwoLayers(("a", "b")), mesh, plan={}, example_inputs=example)
        elif case == "only one rank captures":
            ep_fx.transform(TwoLayers(("a", "b")), mesh, plan={}, example_inputs=(torch.zeros(2, 8),) if odd else None)
        elif case == "mode":
            example = (torch.zeros(2, 8, requires_grad=odd),)
            ep_fx.transform(TwoLayers(("a", "b")), mesh, plan={}, example_inputs=example)
        else:
            ep_fx.transform(TwoLayers(("a", "b")), mesh, plan={}, example_inputs=(torch.zeros(2, 8),))
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_another_parameter_order_on_one_rank_stops_all(ranks: RankPools) -> None:
    messages = ranks(4).run(_message, "order")
    assert {kind for kind, _ in messages} == {"DisagreementError"}
    assert len({text for _, text in messages}) == 1
    assert "rank 0: param  a.weight" in messages[0][1]
    assert "rank 2: param  b.weight" in messages[0][1]


def test_example_inputs_on_one_rank_only(ranks: RankPools) -> None:
    for kind, text in ranks(4).run(_message, "only one rank captures"):
        assert kind == "DisagreementError"
        assert "given: capture now" in text


def test_a_parameter_frozen_on_one_rank_only(ranks: RankPools) -> None:
    for kind, text in ranks(4).run(_message, "frozen"):
        assert kind == "DisagreementError"
        assert "rank 2: param  a.weight" in text
        assert "frozen" in text


def test_a_model_that_one_rank_alone_cannot_take(ranks: RankPools) -> None:
    """The rank that found it does not leave the others waiting in a collective."""
    messages = ranks(4).run(_message, "only one rank is wrong", timeout=20)
    for kind, text in messages:
        assert kind == "DisagreementError"
        assert "rank 2: ValueError: blocks.0.moe.experts: num_experts 3" in text


def test_ranks_that_would_communicate_differently(ranks: RankPools) -> None:
    """Equal models, but one rank wants an input gradient: it alone gathers the weights again in backward."""
    assert ranks(4).run(_message, "equal") == [("", "")] * 4
    for kind, text in ranks(4).run(_message, "mode"):
        assert kind == "DisagreementError"
        assert "differ in their captures" in text
        assert "rank 2: backward ep_fx::unshard over fsdp,ep" in text


def test_a_capture_that_fails_on_one_rank_alone(ranks: RankPools) -> None:
    for kind, text in ranks(4).run(_message, "one capture fails", timeout=20):
        assert kind == "DisagreementError"
        assert "is on device meta" in text
