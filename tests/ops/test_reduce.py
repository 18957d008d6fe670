"""reduce_grad and its kin: no argument is written, layouts, the division."""
from __future__ import annotations

import pytest
import torch

import ep_fx.ops  # noqa: F401  defines the operators

ops = torch.ops.ep_fx


@pytest.mark.parametrize("op", ["reduce_grad", "all_reduce_grad"])
def test_sums_are_new_tensors_and_arguments_stay(op: str, local_group: str) -> None:
    grads = [torch.randn(4, 2), torch.randn(3, 4).t(), torch.ones(1, 1).expand(2, 2), torch.randn(4).bfloat16()]
    before = [grad.clone() for grad in grads]
    arguments = (grads, 1, local_group) if op == "reduce_grad" else (grads, local_group)
    sums = ops.reduce_grad_wait(getattr(ops, op)(*arguments))
    for total, grad, old in zip(sums, grads, before, strict=True):
        assert torch.equal(total, old)
        assert torch.equal(grad, old)
        assert total.is_contiguous()
        total.zero_()
        assert torch.equal(grad, old)


def test_wait_returns_the_memory_that_was_started(local_group: str) -> None:
    (started,) = ops.all_reduce_grad([torch.randn(3)], local_group)
    (done,) = ops.reduce_grad_wait([started])
    assert done.data_ptr() == started.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale_grad_divides_into_new_tensors(dtype: torch.dtype) -> None:
    grads = [torch.randn(4, 2, dtype=dtype), torch.zeros(0, 3, dtype=dtype), torch.randn(3, 4, dtype=dtype).t()]
    before = [grad.clone() for grad in grads]
    for scaled, grad, old in zip(ops.scale_grad(grads, 3.0), grads, before, strict=True):
        assert scaled.dtype is dtype
        torch.testing.assert_close(scaled, old / 3.0)
        assert torch.equal(grad, old)


def test_unpad_shard_shares_rows_and_makes_columns_contiguous() -> None:
    shard = torch.randn(4, 6)
    rows, columns = ops.unpad_shard(shard, 0, torch.empty(3, 6)), ops.unpad_shard(shard, 1, torch.empty(4, 2))
    assert rows.data_ptr() == shard.data_ptr()
    assert columns.is_contiguous()
    assert torch.equal(rows, shard[:3])
    assert torch.equal(columns, shard[:, :2])
    assert ops.unpad_shard(shard, 0, torch.empty(0, 6)).shape == (0, 6)
