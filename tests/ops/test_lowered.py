"""regroup, ungroup, send_rows, pad_rows: values, memory, and a whole exchange played by hand between two ranks."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_fx.ops import DispatchContext, dispatch_context

ops = torch.ops.ep_fx


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_ungroup_inverts_regroup_with_copies() -> None:
    x, indices = torch.randn(5, 3), torch.tensor([2, 0, 4, 1, 3])
    grouped = ops.regroup(x, indices)
    assert torch.equal(grouped, x[indices])
    assert torch.equal(ops.ungroup(grouped, indices), x)
    assert not _shares(grouped, x)


def test_send_rows_is_a_view_of_the_first_rows() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(ops.send_rows(x, [1, 0, 2]), x[:3])
    assert _shares(ops.send_rows(x, [1, 0, 2]), x)
    assert _shares(ops.send_rows(x, [3, 2]), x)


def test_send_rows_makes_an_expanded_gradient_contiguous() -> None:
    sent = ops.send_rows(torch.ones(1, 1).expand(5, 3), [2, 2])
    assert sent.is_contiguous()
    assert torch.equal(sent, torch.ones(4, 3))


def test_send_rows_refuses_more_rows_than_there_are() -> None:
    with pytest.raises(RuntimeError, match="exceeds"):
        ops.send_rows(torch.randn(5, 3), [4, 2])


def test_pad_rows_appends_zeros_or_returns_its_argument(poisoned_memory: None) -> None:
    x = torch.randn(3, 2)
    assert torch.equal(ops.pad_rows(x, [5]), torch.cat((x, torch.zeros(2, 2))))
    assert _shares(ops.pad_rows(x, [3]), x)
    assert ops.pad_rows(torch.randn(0, 2), [2]).tolist() == [[0, 0], [0, 0]]


def test_rows_of_one_dimension_travel_too(poisoned_memory: None) -> None:
    weights, indices = torch.rand(4), torch.tensor([3, 1, 0, 2])
    assert torch.equal(ops.ungroup(ops.regroup(ops.send_rows(weights, [4]), indices), indices), weights)
    assert ops.pad_rows(weights, [6])[4:].tolist() == [0, 0]


def _all_to_all(parts: list[Tensor], splits: list[tuple[int, ...]]) -> list[Tensor]:
    pieces = [part.split(split) for part, split in zip(parts, splits, strict=True)]
    return [torch.cat([sender[rank] for sender in pieces]) for rank in range(len(parts))]


def test_reg_2_an_exchange_of_two_ranks_comes_back() -> None:
    """REG-2: combine inverts dispatch for identity experts, each expert having got its own rows from both ranks."""
    counts = torch.tensor([[3, 2, 1, 4], [5, 0, 0, 3]])
    rows = [torch.randn(12, 2), torch.randn(8, 2)]
    received = [counts.view(2, 2, 2)[:, rank].reshape(-1) for rank in range(2)]
    contexts: list[DispatchContext] = [
        dispatch_context(counts[rank], received[rank], len(rows[rank]), 2, "experts") for rank in range(2)
    ]
    inputs, outputs = [c.input_splits for c in contexts], [c.output_splits for c in contexts]
    sent = [ops.send_rows(x, c.input_splits) for x, c in zip(rows, contexts, strict=True)]
    arrived = [ops.regroup(x, c.permuted_indices)
               for x, c in zip(_all_to_all(sent, inputs), contexts, strict=True)]
    torch.testing.assert_close(arrived[0][:8], torch.cat((rows[0][:3], rows[1][:5])))
    back = [ops.ungroup(x, c.permuted_indices) for x, c in zip(arrived, contexts, strict=True)]
    for rank, y in enumerate(_all_to_all(back, outputs)):
        result, count = ops.pad_rows(y, contexts[rank].input_shape), int(counts[rank].sum())
        assert torch.equal(result[:count], rows[rank][:count])
        assert not result[count:].any()
