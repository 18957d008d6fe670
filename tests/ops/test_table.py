"""Every operator of the dialect: the fake kernel agrees with the real one, and the schema with the memory.

The table holds at least one call of each operator; an operator that it lacks fails a test.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from ep_fx.ops import NAMESPACE

Make = Callable[[str], tuple[Any, ...]]
INDICES = torch.tensor([3, 0, 5, 1, 2, 4])
COUNTS = torch.tensor([2, 0, 3])
SPLITS = torch.tensor([[6], [6]])


def f(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Floating-point values."""
    return torch.randn(shape).to(dtype)


def strided(*shape: int) -> Tensor:
    """The same, with the last two dimensions swapped in memory."""
    return f(*shape).mT.contiguous().mT


def ids() -> Tensor:
    """Two of three experts for each of three tokens, one choice of 'no expert'."""
    return torch.tensor([[0, 2], [2, 3], [1, 0]])


def attention_backward_arguments() -> tuple[Any, ...]:
    """Two heads for each key, values narrower than keys, memory that is not contiguous."""
    operands = (strided(2, 4, 3, 8), strided(2, 2, 5, 8), strided(2, 2, 5, 6), f(2, 1, 3, 5))
    results = torch.ops.ep_fx.attention(*operands, False, 0.5)
    return (strided(2, 4, 3, 6), *operands, *results, False, 0.5)


CALLS: list[tuple[str, Make]] = [
    ("permute", lambda g: (f(3, 4), ids(), 3)),
    ("permute", lambda g: (strided(3, 4).bfloat16(), ids().int(), 3)),
    ("permute", lambda g: (f(0, 4), ids()[:0], 3)),
    ("permute_backward", lambda g: (strided(6, 4), INDICES, 3, 2)),
    ("unpermute", lambda g: (f(6, 4, dtype=torch.bfloat16), INDICES, f(3, 2))),
    ("unpermute", lambda g: (strided(6, 4), INDICES, strided(3, 2))),
    ("unpermute_backward", lambda g: (strided(3, 4), strided(6, 4), INDICES, strided(3, 2))),
    ("unpermute_backward", lambda g: (f(3, 4).bfloat16(), f(6, 4).bfloat16(), INDICES, f(3, 2))),
    ("dispatch", lambda g: (strided(7, 4), COUNTS, None, 1, "r")),
    ("dispatch", lambda g: (f(5, 4).bfloat16(), COUNTS.int(), f(5), 1, "r")),
    ("dispatch_backward", lambda g: (strided(6, 4), None, INDICES, SPLITS, 8, "r")),
    ("dispatch_backward", lambda g: (f(6, 4), f(6).double(), INDICES, SPLITS, 6, "r")),
    ("combine", lambda g: (strided(6, 4), INDICES, SPLITS, 8, "r")),
    ("combine_backward", lambda g: (strided(8, 4), INDICES, SPLITS, "r")),
    ("grouped_mm", lambda g: (f(6, 4), f(3, 4, 8), COUNTS, None, False)),
    ("grouped_mm", lambda g: (strided(6, 5), f(3, 2, 5), COUNTS, f(3, 2), True)),
    ("grouped_mm", lambda g: (f(6, 8).bfloat16(), strided(3, 8, 16).bfloat16(), COUNTS, None, False)),
    ("grouped_mm", lambda g: (f(0, 8), f(3, 8, 4), COUNTS * 0, None, False)),
    ("grouped_mm_backward", lambda g: (strided(6, 8), strided(6, 4), f(3, 4, 8), COUNTS, True, False)),
    ("grouped_mm_backward", lambda g: (f(6, 2), f(6, 5), strided(3, 2, 5), COUNTS, False, True)),
    ("tp_share", lambda g: (strided(6, 4), 1, "r")),
    ("tp_sum", lambda g: (f(6, 4).bfloat16(), 1, "r")),
    ("attention", lambda g: (strided(2, 4, 3, 8), f(2, 2, 5, 8), f(2, 2, 5, 6), None, True, 0.5)),
    ("attention", lambda g: (*(f(2, 2, 3, 8).bfloat16() for _ in range(3)), f(3, 3) > 0, False, 0.5)),
    ("attention", lambda g: (f(0, 2, 3, 8), f(0, 2, 5, 8), f(0, 2, 5, 6), None, True, 0.5)),
    ("attention_backward", lambda g: attention_backward_arguments()),
    ("add_bias", lambda g: (strided(6, 2), f(3, 2), COUNTS)),
    ("add_bias", lambda g: (f(6, 2).bfloat16(), f(3, 2), COUNTS)),
    ("add_bias_backward", lambda g: (strided(6, 2), COUNTS)),
    ("counts_of", lambda g: (torch.tensor([2, 2, 5], dtype=torch.int32),)),
    ("regroup", lambda g: (strided(6, 4), INDICES)),
    ("regroup", lambda g: (f(6), INDICES)),
    ("ungroup", lambda g: (strided(6, 4), INDICES)),
    ("send_rows", lambda g: (f(6, 4), [2, 4])),
    ("send_rows", lambda g: (strided(6, 4), [2, 1])),
    ("pad_rows", lambda g: (f(6, 4), [6])),
    ("pad_rows", lambda g: (strided(6, 4), [6])),
    ("pad_rows", lambda g: (strided(6, 4), [8])),
    ("pad_shard", lambda g: (f(3, 4), 0, 3)),
    ("pad_shard", lambda g: (strided(3, 4), 1, 6)),
    ("unshard", lambda g: ([f(3, 4), strided(2, 3), f(5).bfloat16()], 1, g)),
    ("unshard_wait", lambda g: ([f(3, 4), f(5)],)),
    ("assemble", lambda g: (f(6, 4), 0, [3, 1])),
    ("assemble", lambda g: (f(6, 4), 1, [4, 2])),
    ("reshard", lambda g: ([f(3, 4), f(5)],)),
    ("disassemble", lambda g: (strided(4, 6), 0, [3, 1])),
    ("disassemble", lambda g: (f(4, 6), 1, [3, 3])),
    ("reduce_grad", lambda g: ([f(4, 2), strided(2, 3)], 1, g)),
    ("all_reduce_grad", lambda g: ([f(4, 2), strided(2, 3)], g)),
    ("reduce_grad_wait", lambda g: ([f(3, 4), f(5)],)),
    ("scale_grad", lambda g: ([f(4, 2), strided(2, 3), f(3).bfloat16()], 4.0)),
    ("unpad_shard", lambda g: (strided(4, 6), 0, f(3, 6))),
    ("unpad_shard", lambda g: (f(4, 6), 1, f(4, 3))),
    ("unpad_shard", lambda g: (f(4, 6), 0, f(4, 6))),
]
EACH_CALL = pytest.mark.parametrize(
    ("op", "make"), [pytest.param(*call, id=f"{call[0]}-{index}") for index, call in enumerate(CALLS)]
)


def _overload(op: str) -> torch._ops.OpOverload:
    overload = getattr(getattr(torch.ops, NAMESPACE), op).default
    assert isinstance(overload, torch._ops.OpOverload)
    return overload


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _run(op: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The results of one call; what it started is done."""
    return [torch.ops._c10d_functional.wait_tensor(result) for result in _tensors(_overload(op)(*arguments))]


def _same_where_known(real: Iterable[int], fake: Iterable[Any]) -> bool:
    """Whether both agree; only the row count of `dispatch` is not known beforehand."""
    return all(isinstance(two, torch.SymInt) or one == two for one, two in zip(real, fake, strict=True))


def test_the_table_holds_every_operator() -> None:
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    defined = {op for namespace, op in names if namespace == NAMESPACE}
    assert defined == {op for op, _ in CALLS}


@EACH_CALL
def test_fake_kernel_agrees_with_the_real_one(
    op: str, make: Make, local_group: str
) -> None:
    arguments = make(local_group)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fakes = tree_map_only(Tensor, mode.from_tensor, arguments)
    real = _run(op, arguments)
    with mode:
        fake = _tensors(_overload(op)(*fakes))
    assert len(real) == len(fake)
    for one, two in zip(real, fake, strict=True):
        assert (one.dtype, one.device) == (two.dtype, two.device)
        assert _same_where_known(one.shape, two.shape)
        if one.numel():
            assert _same_where_known(one.stride(), two.stride())
        assert op == "dispatch" or not any(isinstance(size, torch.SymInt) for size in two.shape)


@EACH_CALL
def test_memory_is_shared_only_where_the_schema_says_so(
    op: str, make: Make, local_group: str
) -> None:
    arguments, schema = make(local_group), _overload(op)._schema
    given = _tensors(arguments)
    before, sizes = [tensor.clone() for tensor in given], [tensor.shape for tensor in given]
    results = _run(op, arguments)
    declared = any(returned.alias_info for returned in schema.returns)
    for one, other in itertools.product(results, given):
        if one.numel() and other.numel() and not declared:
            assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    for one, other in itertools.combinations([tensor for tensor in results if tensor.numel()], 2):
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert [tensor.shape for tensor in given] == sizes
    if not schema.is_mutable:
        assert all(torch.equal(tensor, old) for tensor, old in zip(given, before, strict=True))


@EACH_CALL
def test_results_are_contiguous(op: str, make: Make, local_group: str) -> None:
    """A collective, a view or a kernel that reads them needs no copy."""
    assert all(result.is_contiguous() for result in _run(op, make(local_group)))
