"""Conditions of the operators on dense rows: swiglu, rms_norm, rotary_mul, and fused attention."""
from __future__ import annotations

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


def _trailing(arguments: Arguments) -> Seen | None:
    """gamma covers the last dimensions of the input."""
    x, gamma = place(arguments, "input"), place(arguments, "gamma")
    if not isinstance(x, Tensor) or not isinstance(gamma, Tensor) or gamma.dim() > x.dim():
        return None
    sizes = zip(x.shape[x.dim() - gamma.dim() :], gamma.shape, strict=True)
    alike = [known(a == b) for a, b in sizes]
    return Seen(False if False in alike else None if None in alike else True, f"{shape_text(gamma)}, {shape_text(x)}")


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
    _words.absent("padding_mask"),
)
_attention_flags = (
    "pre_tockens next_tockens inner_precise=0 prefix actual_seq_qlen actual_seq_kvlen sparse_mode=0 "
    "gen_mask_parallel=True sync=False softmax_layout sink"
)
_swiglu = (
    _words.dtype("input", *FLOATS),
    _words.rank("input", *range(1, 9)),
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
        (*_norm, _words.same_dtype("dy", "input"), _words.dtype("rstd", torch.float32)),
    ),
    Op("npu_rotary_mul", "input r1 r2 rotary_mode=half rotate", (*_rotated, _words.absent("rotate"))),
    Op(
        "npu_rotary_mul_backward",
        "grad input r1 r2 rotary_mode=half",
        (
            *_rotated,
            _words.same_dtype("grad", "input"),
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
            *(_words.dtype(name, torch.float32) for name in ("softmax_max", "softmax_sum")),
        ),
    ),
)
