"""R47, NPU grouped matmul: group list length, kind and dtype.

Sources: vllm-project/vllm-ascend#6059 and #9007, sgl-project/sglang#27748 and PR#13158.
A list as long as all experts meets the weights of the local ones, or counts are passed where running totals are meant:
an error, or rows that are not computed. Here the kernels are those of `ep_fx.testing.npu`, which check every argument
of every call; what they were given is looked at once more, and the numbers are known by hand.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from ep_fx.testing.npu import checks, recorded
from tests.cases.hand import M4
from tests.models.hand_moe import HandMoE, hand_gradient, hand_shares, tokens_for

LOCAL = 2
"""Experts of a rank."""
NAME = "npu_grouped_matmul"
ROUTINGS = {
    "every expert has rows": [[0, 1, 2, 3]] * 4,
    "a group of each rank is empty": [[0, 0, 0, 0], [3, 3, 3, 3]] * 2,
    "a rank has no row": [[0, 0, 0, 0], [0, 0, 1, 1]] * 2,
}


class Given(NamedTuple):
    """What one call of the kernel was given: of its group list, and the rows that it speaks of."""

    group_list: list[int]
    dtype: torch.dtype
    kind: int
    group_type: int
    rows: int
    groups: int


class Run(NamedTuple):
    """What one rank saw."""

    sums: list[float]
    gradient: Tensor
    calls: list[Given]
    kernels: int


def _spy(found: list[Given]) -> Any:
    check = checks.CHECKS[NAME]

    def spy(**arguments: Any) -> None:
        check(**arguments)
        x, weight, kind = arguments["x"][0], arguments["weight"][0], arguments["group_type"]
        sizes = arguments["group_list"]
        found.append(
            Given(
                sizes.tolist(), sizes.dtype, arguments["group_list_type"], kind, x.shape[1 if kind == 2 else 0],
                weight.shape[0] if kind == 0 else LOCAL,
            )
        )  # fmt: skip

    return spy


def _run(rank: int, routing: list[list[int]]) -> Run:
    calls: list[Given] = []
    module = ep_fx.transform(HandMoE(grouped=True), local_mesh(**M4))
    with pytest.MonkeyPatch.context() as patch, recorded() as kernels:
        patch.setitem(checks.CHECKS, NAME, _spy(calls))
        y = module(tokens_for(routing[rank]).to("npu").requires_grad_())
        y.sum(-1).mean().backward()
    gradient = next(p.grad for name, p in module.named_parameters() if name.endswith("experts.w"))
    assert gradient is not None
    whole: Tensor = gradient.full_tensor()  # type: ignore[attr-defined]
    return Run(y.sum(-1).tolist(), whole.cpu(), calls, kernels[f"npu::{NAME}"])


@pytest.mark.parametrize("name", ROUTINGS)
def test_r47_group_lists_are_of_the_local_experts(ranks: RankPools, name: str) -> None:
    routing = ROUTINGS[name]
    runs = ranks(4, "npu").run(_run, routing)
    gradient = hand_gradient(hand_shares(routing))
    for rank, run in enumerate(runs):
        assert run.sums == [expert + 1 for expert in routing[rank]]
        assert torch.allclose(run.gradient, gradient, atol=1e-6, rtol=0)
        first = LOCAL * (rank % 2)
        pair = routing[rank - rank % 2] + routing[rank - rank % 2 + 1]  # the ranks along ep send to each other
        expected = [pair.count(first), pair.count(first + 1)]
        if not sum(expected):
            assert run.calls == []  # an empty call is answered without the kernel
            assert run.kernels == 0
            continue
        assert sorted(given.group_type for given in run.calls) == [0, 0, 2]  # forward, and both gradients
        for given in run.calls:
            assert given.group_list == expected
            assert given.dtype is torch.int64
            assert given.kind == 1  # sizes, stated: the default are running totals
            assert sum(given.group_list) == given.rows
            assert len(given.group_list) == given.groups == LOCAL
        assert run.kernels == 3


def test_r47_the_call_says_what_kind_of_list_it_is() -> None:
    """The fake operator cannot tell a value that was passed from a default; the call can."""
    from ep_fx.targets.npu.kernels import matmul, reached

    x, weight, counts = torch.ones(3, 8), torch.ones(LOCAL, 8, 4), torch.tensor([1, 2], dtype=torch.int32)
    for arguments in ((x, weight, counts), (x.t(), x, counts, None, 2)):
        call = reached(matmul.npu_grouped_matmul, *arguments)
        assert call is not None
        assert call.kwargs["group_list_type"] == 1
        assert call.kwargs["group_list"].dtype is torch.int64
    assert reached(matmul.npu_grouped_matmul, x[:0], weight, counts) is None
