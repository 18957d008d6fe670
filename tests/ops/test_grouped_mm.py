"""grouped_mm: values and gradients on the native path and in the loop, empty experts, rows behind the last expert's."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ep_fx.ops import grouped_mm as module
from tests.ops.gradients import assert_same_values_and_gradients

ops = torch.ops.ep_fx
COUNTS = ([3, 0, 2, 1], [0, 0, 0, 6], [0, 0, 0, 0], [1, 1, 1, 1])
SHAPES = [
    pytest.param(torch.float32, 8, 12, id="native"),
    pytest.param(torch.float32, 6, 10, id="widths-of-6-and-10"),
    pytest.param(torch.float64, 8, 6, id="fp64"),
]


def _weight(experts: int, d_in: int, d_out: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    shape = (experts, d_out, d_in) if transposed else (experts, d_in, d_out)
    return torch.randn(shape, dtype=dtype)


def _reference(counts: list[int], transposed: bool):  # type: ignore[no-untyped-def]
    def product(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        parts = []
        for expert, rows in enumerate(x[: sum(counts)].split(counts)):
            matrix = weight[expert].t() if transposed else weight[expert]
            parts.append(rows @ matrix + (bias[0][expert] if bias else 0))
        return F.pad(torch.cat(parts), (0, 0, 0, x.shape[0] - sum(counts)))

    return product


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["in-out", "out-in"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("dtype", "d_in", "d_out"), SHAPES)
def test_values_and_gradients(
    dtype: torch.dtype, d_in: int, d_out: int, counts: list[int], transposed: bool, bias: bool, poisoned_memory: None
) -> None:
    """Eight rows, of which the counted ones have experts; all other memory is NaN at first."""
    inputs = [torch.randn(8, d_in, dtype=dtype), _weight(4, d_in, d_out, transposed, dtype)]
    inputs += [torch.randn(4, d_out, dtype=dtype)] * bias

    def ours(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        return ops.grouped_mm(x, weight, torch.tensor(counts), rest[0] if rest else None, transposed)

    assert_same_values_and_gradients(ours, _reference(counts, transposed), inputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_odd_numbers_of_rows_on_the_native_path(dtype: torch.dtype, rows: int) -> None:
    """The weight gradient sums over rows, whose number has no alignment."""
    assert module._is_native(torch.empty(rows, 16, dtype=dtype), torch.empty(2, 16, 8, dtype=dtype))
    counts = [rows // 2, rows - rows // 2]
    inputs = [torch.randn(rows, 16, dtype=dtype), _weight(2, 16, 8, False, dtype)]
    assert_same_values_and_gradients(
        lambda x, weight: ops.grouped_mm(x, weight, torch.tensor(counts), None, False),
        _reference(counts, False), inputs, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-1,
    )


@pytest.mark.parametrize(("dtype", "d_in", "d_out"), SHAPES)
def test_rows_behind_the_last_expert_are_exactly_zero(
    dtype: torch.dtype, d_in: int, d_out: int, poisoned_memory: None
) -> None:
    """R09: uninitialised memory is NaN, and so are those rows of the input and of the gradient; nothing of it shows."""
    x = torch.randn(8, d_in, dtype=dtype)
    x[6:] = torch.nan
    weight, bias = _weight(4, d_in, d_out, False, dtype), torch.randn(4, d_out, dtype=dtype)
    counts = torch.tensor([3, 0, 2, 1])
    y = ops.grouped_mm(x, weight, counts, bias, False)
    grad = torch.randn_like(y)
    grad[6:] = torch.nan
    grad_x, grad_weight, grad_bias = ops.grouped_mm_backward(grad, x, weight, counts, True, False)
    assert (y[6:] == 0).all()
    assert (grad_x[6:] == 0).all()
    assert all(tensor.isfinite().all() for tensor in (y, grad_x, grad_weight, grad_bias))
    assert (grad_weight[1] == 0).all()
    assert (grad_bias[1] == 0).all()


@pytest.mark.parametrize("transposed", [False, True], ids=["in-out", "out-in"])
@pytest.mark.parametrize(("dtype", "d_in", "d_out"), SHAPES)
def test_expanded_gradients_and_layout_of_the_weight_gradient(
    dtype: torch.dtype, d_in: int, d_out: int, transposed: bool
) -> None:
    x = torch.randn(5, d_in, dtype=dtype, requires_grad=True)
    weight = _weight(2, d_in, d_out, transposed, dtype).requires_grad_()
    ops.grouped_mm(x, weight, torch.tensor([2, 3]), None, transposed).sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_contiguous()
    expected = x.detach()[:2].sum(0).unsqueeze(1).expand(d_in, d_out)
    torch.testing.assert_close(weight.grad[0], expected.t() if transposed else expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "d_in", "d_out"), SHAPES)
def test_zero_rows(dtype: torch.dtype, d_in: int, d_out: int) -> None:
    x = torch.zeros(0, d_in, dtype=dtype, requires_grad=True)
    weight = _weight(3, d_in, d_out, False, dtype).requires_grad_()
    bias = torch.randn(3, d_out, dtype=dtype, requires_grad=True)
    y = ops.grouped_mm(x, weight, torch.zeros(3, dtype=torch.int64), bias, False)
    y.sum().backward()
    assert y.shape == (0, d_out)
    for leaf in (x, weight, bias):
        assert leaf.grad is not None
        assert not leaf.grad.any()


@pytest.mark.parametrize("layout", ["strided-rows", "misaligned-start", "transposed-weight"])
def test_operands_that_are_not_contiguous(layout: str) -> None:
    x, weight = torch.randn(6, 8), torch.randn(2, 8, 4)
    if layout == "strided-rows":
        x = torch.randn(6, 10)[:, 1:9]
    elif layout == "misaligned-start":
        x = torch.randn(49)[1:].view(6, 8)
    else:
        weight = torch.randn(2, 4, 8).mT
    assert_same_values_and_gradients(
        lambda rows, matrix: ops.grouped_mm(rows, matrix, torch.tensor([2, 4]), None, False),
        _reference([2, 4], False), [x, weight], rtol=1e-5, atol=1e-5,
    )
    y = ops.grouped_mm(x, weight, torch.tensor([2, 4]), None, False)
    torch.testing.assert_close(y, _reference([2, 4], False)(x, weight))


def test_more_counted_rows_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="more than the 5 rows there are, 6"):
        ops.grouped_mm(torch.randn(5, 8), torch.randn(2, 8, 4), torch.tensor([3, 3]), None, False)


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"one dtype, got torch\.bfloat16 and torch\.float32"):
        ops.grouped_mm(torch.randn(5, 8).bfloat16(), torch.randn(2, 8, 4), torch.tensor([2, 3]), None, False)


def test_the_native_path_of_an_accelerator_reads_no_value_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has no values: any read of one would raise."""
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: a.new_empty(
        (a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    ))
    monkeypatch.setattr(module, "_plain", lambda operand: operand.contiguous())
    with FakeTensorMode():
        x = torch.empty(5, 8, dtype=torch.bfloat16, device="meta")
        weight, bias = x.new_empty(2, 8, 16), x.new_empty(2, 16)
        counts = x.new_empty(2, dtype=torch.int64)
        y = module._grouped_mm(x, weight, counts, bias, False)
        grad_x, grad_weight, grad_bias = module._grouped_mm_backward(y, x, weight, counts, True, False)
    assert (y.shape, grad_x.shape, grad_weight.shape, grad_bias.shape) == ((5, 16), x.shape, weight.shape, bias.shape)
