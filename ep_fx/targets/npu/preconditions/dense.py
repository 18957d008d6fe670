"""Conditions of the operators on dense rows: swiglu, rms_norm, rotary_mul, and fused attention."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ep_fx.targets.npu.preconditions.build import FLOATS, Op, Size, Words, dim, number, place, product, shape_text
from ep_fx.targets.npu.preconditions.condition import Arguments, Look, Seen, known

MAX_ROTARY_WIDTH, MAX_ROTARY, MAX_ROTARY_GRADIENT = 896, 1000, 1024
MAX_HEAD_WIDTH, MAX_HEADS, MAX_SEQUENCE, MAX_BATCH = 768, 256, 1 << 20, 2 << 20
_words = Words("torch_npu 2.13.0 _op_plugin_docs.py")


def _along(name: str) -> Size:
    """Size of a tensor along the argument `dim`."""

    def of(arguments: Arguments) -> Any:
        tensor, index = place(arguments, name), arguments["dim"]
        inside = isinstance(tensor, Tensor) and isinstance(index, int) and -tensor.dim() <= index < tensor.dim()
        return tensor.shape[index] if inside else None

    return Size(f"{name}.shape[dim]", of)


def _every(pairs: Sequence[tuple[Any, Any]], got: str, *, or_one: bool = False) -> Seen:
    """Whether the numbers of every pair are the same (or the first of them is 1)."""
    alike = [True if or_one and known(a == 1) else known(a == b) for a, b in pairs]
    return Seen(False if False in alike else None if None in alike else True, got)


def _same_shape(name: str, other: str) -> Look:
    def look(arguments: Arguments) -> Seen | None:
        a, b = place(arguments, name), place(arguments, other)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return None
        got = f"{shape_text(a)}, {other} is {shape_text(b)}"
        return _every(list(zip(a.shape, b.shape, strict=True)), got) if a.dim() == b.dim() else Seen(False, got)

    return look


def _spread_over_input(name: str) -> Look:
    def look(arguments: Arguments) -> Seen | None:
        angle, x = place(arguments, name), place(arguments, "input")
        if not isinstance(angle, Tensor) or not isinstance(x, Tensor) or angle.dim() != 4 or x.dim() != 4:
            return None
        pairs = list(zip(angle.shape[:3], x.shape[:3], strict=True))
        return _every(pairs, f"{shape_text(angle)}, input is {shape_text(x)}", or_one=True)

    return look


def _reciprocal_root(arguments: Arguments) -> Seen | None:
    """rstd has the input's sizes, but 1 where gamma is."""
    x, gamma, rstd = (place(arguments, name) for name in ("input", "gamma", "rstd"))
    if not all(isinstance(tensor, Tensor) for tensor in (x, gamma, rstd)) or gamma.dim() > x.dim():
        return None
    wanted = [*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()]
    got = f"{shape_text(rstd)}, input is {shape_text(x)}"
    return _every(list(zip(rstd.shape, wanted, strict=True)), got) if rstd.dim() == x.dim() else Seen(False, got)


def _is_dimension(arguments: Arguments) -> Seen | None:
    x, index = place(arguments, "input"), arguments["dim"]
    if not isinstance(x, Tensor):
        return None
    return Seen(isinstance(index, int) and -x.dim() <= index < x.dim(), f"dim {index} of {x.dim()}-D")


def _trailing(arguments: Arguments) -> Seen | None:
    """gamma covers the last dimensions of the input."""
    x, gamma = place(arguments, "input"), place(arguments, "gamma")
    if not isinstance(x, Tensor) or not isinstance(gamma, Tensor) or gamma.dim() > x.dim():
        return None
    pairs = list(zip(x.shape[x.dim() - gamma.dim() :], gamma.shape, strict=True))
    return _every(pairs, f"{shape_text(gamma)}, {shape_text(x)}")


def _rotary(*names: str) -> Size:
    """Batch or heads of `input`: its place follows from where r1 has size 1, which its layouts have at the heads."""
    label = " * ".join(names)

    def of(arguments: Arguments) -> Any:
        x, r1 = place(arguments, "input"), place(arguments, "r1")
        if not isinstance(x, Tensor) or not isinstance(r1, Tensor) or x.dim() != 4 or r1.dim() != 4:
            return None
        heads = 2 if known(r1.shape[2] == 1) and not known(r1.shape[1] == 1) else 1
        batch = 1 if heads == 2 and not known(r1.shape[0] == 1) and known(r1.shape[1] == 1) else 0
        size: Any = 1
        for name in names:
            size = size * x.shape[batch if name == "batch" else heads]
        return size

    return Size(f"input.{label}", of)


def _layout(look: Look) -> Look:
    return lambda arguments: look(arguments) if arguments["input_layout"] in ("BNSD", "BSND") else None


def _attention(name: str, letter: str) -> Size:
    """Size of `name` along a letter of the layout."""

    def of(arguments: Arguments) -> Any:
        tensor, layout = place(arguments, name), arguments["input_layout"]
        if not isinstance(tensor, Tensor) or not isinstance(layout, str) or tensor.dim() != len(layout):
            return None
        return tensor.shape[layout.index(letter)] if letter in layout else None

    return Size(f"{name}.{letter}", of)


def _heads_divide(arguments: Arguments) -> Seen | None:
    queries, keys = _attention("query", "N").of(arguments), _attention("key", "N").of(arguments)
    if queries is None or keys is None:
        return None
    return Seen(queries % keys == 0, f"{queries} heads of query, {keys} of key")


def _value_width(arguments: Arguments) -> Seen | None:
    key, value = _attention("key", "D").of(arguments), _attention("value", "D").of(arguments)
    return None if key is None or value is None else Seen(value <= key, f"{value} of value, {key} of key")


def _packed_mask(arguments: Arguments) -> Seen | None:
    if arguments["sparse_mode"] not in (2, 3, 4):
        return None
    mask = place(arguments, "atten_mask")
    if not isinstance(mask, Tensor):
        return Seen(False, "no atten_mask")
    return Seen(list(mask.shape) == [2048, 2048], shape_text(mask))


def _whole_mask(arguments: Arguments) -> Seen | None:
    """``[S, T]``, or 4-D with one or all sequences and heads."""
    mask = place(arguments, "atten_mask")
    sizes = [_attention("query", letter).of(arguments) for letter in "BNS"] + [_attention("key", "S").of(arguments)]
    if arguments["sparse_mode"] in (2, 3, 4) or not isinstance(mask, Tensor) or None in sizes:
        return None
    got = f"{shape_text(mask)} for {sizes}"
    if mask.dim() not in (2, 4):
        return Seen(False, got)
    exact = _every(list(zip(mask.shape[-2:], sizes[2:], strict=True)), got)
    spread = _every(list(zip(mask.shape[:-2], sizes[: mask.dim() - 2], strict=True)), got, or_one=True)
    return exact if exact.holds is not True else spread


def _statistics(name: str) -> Look:
    """``[B, N, S, 8]`` in either layout."""

    def look(arguments: Arguments) -> Seen | None:
        found = place(arguments, name)
        sizes = [_attention("query", letter).of(arguments) for letter in "BNS"]
        if None in sizes or not isinstance(found, Tensor):
            return None
        got = f"{shape_text(found)} for {sizes}"
        return _every(list(zip(found.shape, [*sizes, 8], strict=True)), got) if found.dim() == 4 else Seen(False, got)

    return look


_floats = tuple(_words.dtype(name, *FLOATS) for name in ("query", "key", "value"))
_attention_conditions = (
    *_floats,
    _words.same_dtype("key", "query"),
    _words.same_dtype("value", "query"),
    _words.value("input_layout", "BNSD", "BSND"),
    *(_words.rank(name, 4) for name in ("query", "key", "value")),
    _words.equal(number("head_num"), _attention("query", "N"), "the heads of query"),
    _words.at_most(_attention("query", "N"), MAX_HEADS, "heads"),
    _words.that("key", "a number of heads that divides that of query", _layout(_heads_divide), "repeat the keys"),
    _words.equal(_attention("key", "D"), _attention("query", "D"), "one width of heads"),
    _words.equal(_attention("key", "B"), _attention("query", "B"), "one batch"),
    _words.equal(_attention("value", "S"), _attention("key", "S"), "one sequence of keys and values"),
    _words.equal(_attention("value", "N"), _attention("key", "N"), "as many heads of values as of keys"),
    _words.that("value", "heads of at most the width of the keys'", _layout(_value_width), "pad the keys"),
    _words.at_most(_attention("query", "D"), MAX_HEAD_WIDTH, "elements a head"),
    _words.at_most(_attention("query", "B"), MAX_BATCH, "sequences"),
    _words.at_most(_attention("query", "S"), MAX_SEQUENCE, "positions"),
    _words.at_most(_attention("key", "S"), MAX_SEQUENCE, "positions"),
    _words.dtype("atten_mask", torch.bool, torch.uint8, remedy="True where a position is masked out"),
    _words.that("atten_mask", "the packed triangle [2048, 2048] for sparse_mode 2, 3 and 4", _packed_mask, "pass it"),
    _words.that("atten_mask", "[S, T], or [B or 1, N or 1, S, T], where it is no packed triangle", _whole_mask,
                "expand it"),
    _words.value("sparse_mode", 0, 1, 2, 3, 4),
    _words.value("keep_prob", 1.0),
    _words.absent("padding_mask", "pse"),
)
_attention_flags = (
    "pre_tockens next_tockens inner_precise=0 prefix actual_seq_qlen actual_seq_kvlen sparse_mode=0 "
    "gen_mask_parallel=True sync=False softmax_layout sink"
)
_swiglu = (
    _words.dtype("input", *FLOATS),
    _words.rank("input", *range(1, 9)),
    _words.that("dim", "a dimension of input", _is_dimension, "pass -1"),
    _words.multiple(_along("input"), 2, "elements along dim"),
)
_norm = (
    _words.dtype("input", *FLOATS),
    _words.rank("input", *range(2, 9)),
    _words.same_dtype("gamma", "input"),
    _words.rank("gamma", *range(1, 9)),
    _words.that("gamma", "the last dimensions of input", _trailing, "pass the weight as the module has it"),
)
_rotated = (
    _words.dtype("input", *FLOATS),
    _words.rank("input", 4),
    *(_words.same_dtype(name, "input") for name in ("r1", "r2")),
    *(_words.rank(name, 4) for name in ("r1", "r2")),
    _words.value("rotary_mode", "half", "interleave"),
    _words.multiple(dim("input", 3), 2, "elements a head"),
    _words.below(dim("input", 3), MAX_ROTARY_WIDTH, "elements a head"),
    *(_words.equal(dim(name, 3), dim("input", 3), "the width of the heads") for name in ("r1", "r2")),
    _words.that("r2", "the shape of r1", _same_shape("r2", "r1"), "pass cosine and sine of the same angles"),
    *(
        _words.that(name, "of each other dimension 1 or the size of input", _spread_over_input(name),
                    "pass the angles of these positions")
        for name in ("r1", "r2")
    ),
    _words.below(_rotary("batch"), MAX_ROTARY, "sequences"),
    _words.below(_rotary("heads"), MAX_ROTARY, "heads"),
)

OPS = (
    Op("npu_swiglu", "input dim=-1", _swiglu),
    Op(
        "npu_swiglu_backward",
        "grad_output input dim=-1",
        (
            *_swiglu,
            _words.same_dtype("grad_output", "input"),
            _words.equal(product(_along("grad_output"), Size("2", lambda _: 2)), _along("input"), "half of the input"),
        ),
    ),
    Op("npu_rms_norm", "input gamma epsilon", _norm),
    Op(
        "npu_rms_norm_backward",
        "dy input gamma rstd",
        (
            *_norm,
            _words.same_dtype("dy", "input"),
            _words.that("dy", "the shape of input", _same_shape("dy", "input"), "pass the gradient of the result"),
            _words.dtype("rstd", torch.float32),
            _words.that("rstd", "one number for each norm, [.., 1]", _reciprocal_root, "pass what npu_rms_norm gave"),
        ),
    ),
    Op("npu_rotary_mul", "input r1 r2 rotary_mode=half rotate", (*_rotated, _words.absent("rotate"))),
    Op(
        "npu_rotary_mul_backward",
        "grad input r1 r2 rotary_mode=half",
        (
            *_rotated,
            _words.same_dtype("grad", "input"),
            _words.that("grad", "the shape of input", _same_shape("grad", "input"), "pass the gradient of the result"),
            _words.at_most(_rotary("batch", "heads"), MAX_ROTARY_GRADIENT, "heads of all sequences"),
        ),
    ),
    Op(
        "npu_fusion_attention",
        f"query key value head_num input_layout pse padding_mask atten_mask scale keep_prob=1. {_attention_flags} "
        "dropout_mask seed offset",
        _attention_conditions,
    ),
    Op(
        "npu_fusion_attention_grad",
        "query key value dy head_num input_layout pse padding_mask atten_mask softmax_max softmax_sum softmax_in "
        "attention_in scale_value keep_prob=1. pre_tockens next_tockens inner_precise=0 seed offset numels prefix "
        "actual_seq_qlen actual_seq_kvlen sparse_mode=0 gen_mask_parallel=True sync=False softmax_layout sink",
        (
            *_attention_conditions,
            _words.same_dtype("dy", "query"),
            _words.that("dy", "the shape of query", _same_shape("dy", "query"), "pad it as the values"),
            *(_words.given(name, "forward gave it") for name in ("softmax_max", "softmax_sum", "attention_in")),
            *(_words.dtype(name, torch.float32) for name in ("softmax_max", "softmax_sum")),
            *(
                _words.that(name, "[B, N, S, 8]", _statistics(name), "pass what npu_fusion_attention gave")
                for name in ("softmax_max", "softmax_sum")
            ),
            _words.same_dtype("attention_in", "query"),
            _words.that("attention_in", "the shape of query", _same_shape("attention_in", "query"),
                        "pass the result of forward, padded as the values"),
        ),
    ),
)
