"""permute / unpermute: order, counts, sentinels, inverse, precision, gradients."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ep_fx.ops  # noqa: F401  defines the operators
from tests.ops.gradients import assert_same_values_and_gradients

ops = torch.ops.ep_fx
E, D = 4, 6


def _ids(tokens: int, top_k: int, low: int = 0, high: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + top_k)
    return torch.randint(low, high, (tokens, top_k), generator=generator)


def test_rows_are_in_expert_order_and_stable() -> None:
    x = torch.arange(4.0).unsqueeze(1)
    rows, tokens_per_expert, indices = ops.permute(x, torch.tensor([[2, 0], [0, 2], [2, 0], [0, 3]]), 4)
    assert indices.tolist() == [1, 2, 5, 6, 0, 3, 4, 7]
    assert rows.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert tokens_per_expert.tolist() == [4, 0, 3, 1]
    assert indices.dtype == tokens_per_expert.dtype == torch.int64


def test_id_equal_to_num_experts_means_no_expert() -> None:
    x = torch.arange(3.0).unsqueeze(1)
    rows, tokens_per_expert, indices = ops.permute(x, torch.tensor([[2, 1], [2, 0], [1, 2]]), 2)
    assert tokens_per_expert.tolist() == [1, 2]
    assert indices.tolist() == [3, 1, 4, 0, 2, 5]
    assert rows.flatten().tolist() == [1, 0, 2, 0, 1, 2]


@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_out_of_range_name_the_range(bad: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.4 .*'no expert'.*got values from"):
        ops.permute(torch.zeros(2, 3), torch.tensor([[0], [bad]]), 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_dtypes(dtype: torch.dtype) -> None:
    rows, _, indices = ops.permute(torch.zeros(3, 2), _ids(3, 2).to(dtype), E)
    assert rows.shape == (6, 2)
    assert indices.dtype == torch.int64


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_reg_2_unpermute_inverts_permute(top_k: int) -> None:
    """REG-2: unpermute(permute(x)) = x, for weights 1 with k=1 and for weights that sum to 1."""
    x = torch.randn(9, D, dtype=torch.float64)
    rows, _, indices = ops.permute(x, _ids(9, top_k), E)
    weights = torch.rand(9, top_k, dtype=torch.float64).softmax(1)
    torch.testing.assert_close(ops.unpermute(rows, indices, weights), x)


def test_reg_2_unpermute_of_one_choice_with_weight_one_is_exact() -> None:
    """REG-2: with k=1 and weight 1 nothing is rounded."""
    x = torch.randn(9, D)
    rows, _, indices = ops.permute(x, _ids(9, 1), E)
    assert torch.equal(ops.unpermute(rows, indices, torch.ones(9, 1)), x)


def test_sums_keep_fp32_for_fp32_rows() -> None:
    _, _, indices = ops.permute(torch.ones(1, 1), torch.tensor([[0, 1]]), 2)
    y = ops.unpermute(torch.tensor([[1.0], [2.0**-10]]), indices, torch.ones(1, 2))
    assert y.item() == 1.0009765625


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_rows_are_kept_in_fp32(dtype: torch.dtype) -> None:
    """Eight parts of 2**-10 (2**-13 for fp16) vanish one by one beside 1.0 in the rows' own dtype, but not together."""
    small = 2.0**-10 if dtype is torch.bfloat16 else 2.0**-13
    _, _, indices = ops.permute(torch.ones(1, 1, dtype=dtype), torch.arange(9).unsqueeze(0), 9)
    rows = torch.tensor([[1.0], *[[small]] * 8], dtype=dtype)
    y = ops.unpermute(rows, indices, torch.ones(1, 9))
    assert y.dtype is dtype
    assert y.item() == 1.0 + 8 * small


def test_fp32_router_with_bf16_rows_keeps_both_dtypes() -> None:
    rows = torch.randn(6, D, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(3, 2, requires_grad=True)
    _, _, indices = ops.permute(torch.zeros(3, D), _ids(3, 2), E)
    y = ops.unpermute(rows, indices, weights)
    grad_rows, grad_weights = torch.autograd.grad(y, (rows, weights), torch.ones_like(y))
    assert (y.dtype, grad_rows.dtype, grad_weights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    expected = torch.empty(6).index_put_((indices,), rows.detach().float().sum(1)).view(3, 2)
    torch.testing.assert_close(grad_weights, expected)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("num_experts", [E, 1], ids=["experts", "all-one"])
def test_gradient_of_permute(tokens: int, top_k: int, num_experts: int) -> None:
    ids = _ids(tokens, top_k, high=num_experts + 1)
    order = ids.flatten().argsort(stable=True)
    assert_same_values_and_gradients(
        lambda x: ops.permute(x, ids, num_experts)[0],
        lambda x: x[order // top_k],
        [torch.randn(tokens, D, dtype=torch.float64)],
    )


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_gradient_of_unpermute(tokens: int, top_k: int) -> None:
    ids = _ids(tokens, top_k, high=E + 1)
    order = ids.flatten().argsort(stable=True)

    def reference(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(tokens, D, dtype=rows.dtype).index_add(
            0, order // top_k, rows * weights.flatten()[order].unsqueeze(1)
        )

    inputs = [torch.randn(tokens * top_k, D, dtype=torch.float64), torch.rand(tokens, top_k, dtype=torch.float64)]
    assert_same_values_and_gradients(lambda rows, weights: ops.unpermute(rows, order, weights), reference, inputs)


def test_expanded_gradients_are_taken() -> None:
    x = torch.randn(5, D, requires_grad=True)
    ids = _ids(5, 2)
    rows, _, indices = ops.permute(x, ids, E)
    ops.unpermute(rows, indices, torch.full((5, 2), 0.5)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(5, D))
