"""dispatch / combine on one rank: what arrives, what comes back, gradients, and the refusal of more ranks."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ep_fx.ops  # noqa: F401  defines the operators
from tests.ops.gradients import assert_same_values_and_gradients

ops = torch.ops.ep_fx
COUNTS = ([3, 0, 2], [0, 0, 0], [2, 2, 3])
N, D = 7, 5


def _dispatch(x: Tensor, counts: list[int], weights: Tensor | None = None) -> tuple[Tensor, ...]:
    return tuple(ops.dispatch(x, torch.tensor(counts), weights, 1, "experts"))


@pytest.mark.parametrize("counts", COUNTS)
def test_counted_rows_arrive_and_are_copies(counts: list[int]) -> None:
    x, weights, total = torch.randn(N, D), torch.rand(N), sum(counts)
    routed, routed_weights, local, indices, splits = _dispatch(x, counts, weights)
    assert torch.equal(routed, x[:total])
    assert torch.equal(routed_weights, weights[:total])
    assert local.tolist() == counts
    assert indices.tolist() == list(range(total))
    assert splits.tolist() == [[total], [total]]
    routed.zero_()
    assert not (x[:total] == 0).any()


def test_no_weights_give_no_routed_weights() -> None:
    assert _dispatch(torch.randn(N, D), [3, 0, 2])[1].shape == (0,)


@pytest.mark.parametrize("counts", COUNTS)
def test_reg_2_combine_inverts_dispatch_for_an_identity_expert(counts: list[int], poisoned_memory: None) -> None:
    """REG-2: combine inverts dispatch for an identity expert; rows that no expert takes come back as 0."""
    x = torch.randn(N, D)
    routed, _, _, indices, splits = _dispatch(x, counts)
    y = ops.combine(routed, indices, splits, N, "experts")
    assert torch.equal(y[: sum(counts)], x[: sum(counts)])
    assert torch.equal(y[sum(counts) :], torch.zeros(N - sum(counts), D))


@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_with_weights(counts: list[int], poisoned_memory: None) -> None:
    total = sum(counts)

    def ours(x: Tensor, weights: Tensor) -> Tensor:
        routed, routed_weights, _, indices, splits = _dispatch(x, counts, weights)
        return ops.combine(routed.sin() * routed_weights.unsqueeze(1), indices, splits, N, "experts")

    def reference(x: Tensor, weights: Tensor) -> Tensor:
        sent = x[:total].sin() * weights[:total].unsqueeze(1)
        return torch.cat((sent, sent.new_zeros(N - total, D)))

    inputs = [torch.randn(N, D, dtype=torch.float64), torch.rand(N, dtype=torch.float64)]
    assert_same_values_and_gradients(ours, reference, inputs)


@pytest.mark.parametrize("used", ["rows", "weights"])
def test_a_result_that_nobody_reads_has_gradient_zero(used: str) -> None:
    def ours(x: Tensor, weights: Tensor) -> Tensor:
        return _dispatch(x, [3, 0, 2], weights)[0 if used == "rows" else 1] * 2

    def reference(x: Tensor, weights: Tensor) -> Tensor:
        return (x if used == "rows" else weights)[:5] * 2

    inputs = [torch.randn(N, D, dtype=torch.float64), torch.rand(N, dtype=torch.float64)]
    assert_same_values_and_gradients(ours, reference, inputs)


def test_expanded_gradients_are_taken() -> None:
    x = torch.randn(N, D, requires_grad=True)
    routed, _, _, indices, splits = _dispatch(x, [3, 0, 2])
    ops.combine(routed, indices, splits, N, "experts").sum().backward()
    assert x.grad is not None
    assert x.grad.sum(1).tolist() == [D] * 5 + [0] * 2


def test_no_tokens_at_all() -> None:
    x = torch.zeros(0, D, requires_grad=True)
    routed, _, _, indices, splits = _dispatch(x, [0, 0, 0])
    y = ops.combine(routed, indices, splits, 0, "experts")
    y.sum().backward()
    assert y.shape == (0, D)
    assert x.grad is not None


def test_only_real_results_carry_gradients() -> None:
    x = torch.randn(N, D, requires_grad=True)
    assert [result.requires_grad for result in _dispatch(x, [3, 0, 2])] == [True, False, False, False, False]
    weighted = _dispatch(x, [3, 0, 2], torch.rand(N))
    assert [result.requires_grad for result in weighted[2:]] == [False] * 3


def test_more_counted_tokens_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'experts': 9 tokens are counted, x has 7 rows"):
        _dispatch(torch.randn(N, D), [9, 0, 0])


@pytest.mark.parametrize("op", ["dispatch", "dispatch_backward", "combine", "combine_backward"])
def test_more_ranks_must_be_lowered(op: str) -> None:
    x, indices, splits = torch.randn(N, D), torch.arange(N), torch.zeros(2, 4, dtype=torch.int64)
    arguments = {
        "dispatch": (x, torch.zeros(8, dtype=torch.int64), None, 4, "experts"),
        "dispatch_backward": (x, None, indices, splits, N, "experts"),
        "combine": (x, indices, splits, N, "experts"),
        "combine_backward": (x, indices, splits, "experts"),
    }[op]
    with pytest.raises(RuntimeError, match=f"ep_fx.{op} .*'experts'.* must be lowered by the expert-parallel pass"):
        getattr(ops, op)(*arguments)
