"""Conditions of the grouped products.

Only what is emitted is allowed: one left operand, groups along its rows (``group_type`` 0) or along the summed
dimension (2), a device tensor as group list, and one result. The docstring in the wheel also says that a list of sizes
must not have length 1; the operator's own document (aclnnGroupedMatmulV4) does not, so it is no condition here.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ep_fx.targets.npu.preconditions.build import FLOATS, HALVES, Op, Size, Words, count, dim, place, shape_text
from ep_fx.targets.npu.preconditions.condition import Arguments, Look, Seen, known

MAX_GROUPS, MAX_ITEMS, INNER_LIMIT = 1024, 128, 65536
_words = Words("torch_npu 2.13.0 _op_plugin_docs.py")
_aclnn = Words("CANN ops-transformer, aclnnGroupedMatmulV4")
_QUANTISED = (
    "scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale", "activation_input",
    "activation_quant_scale", "activation_quant_offset",
)
_int64 = "pass one int64 per local expert"
_BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}


def _for(group_type: int, look: Look) -> Look:
    """`look`, where the groups lie along this dimension."""
    return lambda arguments: look(arguments) if arguments.get("group_type") == group_type else None


def _one_dtype(arguments: Arguments) -> Seen:
    operands = [t for name in ("x", "weight") for t in arguments[name] or () if isinstance(t, Tensor)]
    found = sorted({str(tensor.dtype) for tensor in operands})
    return Seen(len(found) == 1, " and ".join(found))


def _ranks(x: int, weight: int) -> Look:
    def look(arguments: Arguments) -> Seen:
        operands = [*(arguments["x"] or ()), *(arguments["weight"] or ())]
        wanted = [x] * len(arguments["x"] or ()) + [weight] * len(arguments["weight"] or ())
        return Seen([t.dim() for t in operands] == wanted, ", ".join(map(shape_text, operands)))

    return look


def _equal(left: Size, right: Size) -> Look:
    def look(arguments: Arguments) -> Seen | None:
        a, b = left.of(arguments), right.of(arguments)
        return None if a is None or b is None else Seen(a == b, f"{left.text} = {a}, {right.text} = {b}")

    return look


def _inner(name: str) -> Size:
    """The dimension that lies together in memory: the last one, of a transposed view the one before."""

    def of(arguments: Arguments) -> Any:
        tensor = place(arguments, name)
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            return None
        return tensor.shape[-1] if known(tensor.stride(-1) == 1) else tensor.shape[-2]

    return Size(f"{name}.inner dimension", of)


def _transposed(arguments: Arguments) -> Seen | None:
    x = place(arguments, "x[0]")
    return Seen(x.stride(0) == 1, f"strides {list(x.stride())}") if isinstance(x, Tensor) and x.dim() == 2 else None


def _bias(arguments: Arguments) -> Seen | None:
    x, bias = place(arguments, "x[0]"), place(arguments, "bias[0]")
    if not isinstance(x, Tensor) or not isinstance(bias, Tensor):
        return None
    return Seen(bias.dtype is _BIAS.get(x.dtype), f"{bias.dtype} for x of {x.dtype}")


def _result_dtype(arguments: Arguments) -> Seen | None:
    x, result = place(arguments, "x[0]"), place(arguments, "result")
    if not isinstance(x, Tensor) or not isinstance(result, Tensor):
        return None
    wanted = arguments.get("output_dtype") or x.dtype
    return Seen(result.dtype is wanted, f"{result.dtype}, of {wanted} it is")


def _bias_of_rows(arguments: Arguments) -> Seen | None:
    if arguments.get("group_type") != 2:
        return None
    return Seen(not arguments.get("bias"), "one")


def _on_device(arguments: Arguments) -> Seen | None:
    groups = arguments.get("group_list")
    return None if groups is None else Seen(isinstance(groups, Tensor), f"{type(groups).__name__} {groups}")


def _total(rows: Size) -> Callable[[Arguments], Seen | None]:
    """Sum of the groups against the rows: to be read only where the list holds numbers on the host."""

    def look(arguments: Arguments) -> Seen | None:
        groups, expected = place(arguments, "group_list"), rows.of(arguments)
        if not isinstance(groups, Tensor) or expected is None:
            return None
        if isinstance(groups, FakeTensor) or groups.device.type != "cpu" or arguments.get("group_list_type") != 1:
            return Seen(None, f"values of group_list, {rows.text} = {expected}")
        return Seen(int(groups.sum()) == expected, f"sum(group_list) = {int(groups.sum())}, {rows.text} = {expected}")

    return look


TOTAL = "all rows: the sizes of the groups add up to them"
"""What is wanted of a group list's values. A graph shows it by where list and rows come from."""

_groups = (
    _words.given("group_list", "a device tensor"),
    _words.that("group_list", "a tensor, whose values nobody waits for", _on_device, "pass the counts as they are"),
    _words.dtype("group_list", torch.int64, remedy=_int64),
    _words.rank("group_list", 1),
    _words.at_least(dim("group_list", 0), 1, "groups"),
    _words.at_most(dim("group_list", 0), MAX_GROUPS, "groups"),
    _words.given("group_list_type", "0 means running totals and is the default"),
)

OPS = (
    Op(
        "npu_grouped_matmul",
        "x weight bias scale offset antiquant_scale antiquant_offset per_token_scale group_list activation_input "
        "activation_quant_scale activation_quant_offset split_item=0 group_type group_list_type act_type=0 "
        "tuning_config output_dtype x_dtype weight_dtype scale_dtype per_token_scale_dtype",
        (
            _words.equal(count("x"), Size("1", lambda _: 1), "one left operand"),
            _words.at_least(count("weight"), 1, "items"),
            _words.at_most(count("weight"), MAX_ITEMS, "items"),
            _words.dtype("x[0]", *FLOATS),
            _words.that("weight", "one dtype for x and weight", _one_dtype, "convert one of them"),
            *_groups,
            _words.value("group_list_type", 0, 1),
            _words.given("group_type", "the dimension of the groups"),
            _aclnn.value("group_type", 0, 2),
            _words.value("split_item", 2, 3),
            _words.that("x", "x 2-D and weight 3-D for groups of rows", _for(0, _ranks(2, 3)), "reshape them"),
            _aclnn.that("x", "x 2-D and weight 2-D for groups of the summed dimension", _for(2, _ranks(2, 2)),
                        "reshape them"),
            _words.that("weight", "the columns of x", _for(0, _equal(dim("weight[0]", 1), dim("x[0]", 1))),
                        "K of both must be the same; transpose the weight as a view if it is [E, N, K]"),
            _aclnn.that("weight", "the columns of x", _for(2, _equal(dim("weight[0]", 0), dim("x[0]", 1))),
                        "K of both must be the same; x is the transposed view [M, K]"),
            _aclnn.that("x", "a transposed view [M, K] for groups of the summed dimension", _for(2, _transposed),
                        "pass rows.t(), not a copy of it"),
            _words.that("group_list", "one entry for each local expert",
                        _for(0, _equal(dim("group_list", 0), dim("weight[0]", 0))),
                        "pass the counts of the local experts, not those of all"),
            _words.that("group_list", "one entry for each matrix of the result",
                        _for(2, _equal(dim("group_list", 0), dim("result", 0))),
                        "pass the counts of the local experts, not those of all"),
            _words.below(_inner("x[0]"), INNER_LIMIT, "elements"),
            _words.below(_inner("weight[0]"), INNER_LIMIT, "elements"),
            _words.that("group_list", TOTAL, _for(0, _total(dim("x[0]", 0))), "pass rows and counts of one dispatch"),
            _words.that("group_list", TOTAL, _for(2, _total(dim("x[0]", 1))), "pass rows and counts of one dispatch"),
            _words.that("bias", "float16 for float16, else float32", _bias, "convert it"),
            _words.rank("bias[0]", 2),
            _words.that("bias", "one row for each local expert",
                        _for(0, _equal(dim("bias[0]", 0), dim("weight[0]", 0))), "pass [E, N]"),
            _words.that("bias", "the columns of the result",
                        _for(0, _equal(dim("bias[0]", 1), dim("weight[0]", 2))), "pass [E, N]"),
            _aclnn.that("bias", "none for groups of the summed dimension", _bias_of_rows, "leave it out"),
            _words.that("result", "the columns of weight", _for(0, _equal(dim("result", 1), dim("weight[0]", 2))),
                        "record what the product gives"),
            _words.that("result", "the rows of x", _for(0, _equal(dim("result", 0), dim("x[0]", 0))),
                        "record what the product gives"),
            _aclnn.that("result", "the columns of weight", _for(2, _equal(dim("result", 2), dim("weight[0]", 1))),
                        "record what the product gives"),
            _aclnn.that("result", "the rows of x", _for(2, _equal(dim("result", 1), dim("x[0]", 0))),
                        "record what the product gives"),
            _words.that("result", "the dtype of x", _result_dtype, "record what the product gives"),
            _words.value("act_type", 0),
            _words.absent(*_QUANTISED),
        ),
    ),
    *(
        Op(
            name,
            "input x weight group_list transpose_x=True transpose_weight=False group_type=2 group_list_type",
            (
                _words.dtype("input", torch.float32),
                _words.rank("input", 3),
                _words.dtype("x", *HALVES),
                _words.same_dtype("weight", "x"),
                _words.rank("x", 2),
                _words.rank("weight", 2),
                *_groups,
                _words.value("group_list_type", 0, 1),
                _words.value("group_type", 2),
                _words.value("transpose_x", True),
                _words.value("transpose_weight", False),
                _words.equal(dim("weight", 0), dim("x", 0), "one row of each for each routed row"),
                _words.equal(dim("input", 0), dim("group_list", 0), "one matrix for each group"),
                _words.equal(dim("input", 1), dim("x", 1), "M"),
                _words.equal(dim("input", 2), dim("weight", 1), "N"),
                _words.below(dim("x", 1), INNER_LIMIT, "elements"),
                _words.below(dim("weight", 1), INNER_LIMIT, "elements"),
                _words.that("group_list", TOTAL, _total(dim("x", 0)), "pass rows and counts of one dispatch"),
            ),
        )
        for name in ("npu_grouped_matmul_add", "npu_grouped_matmul_add_")
    ),
)
