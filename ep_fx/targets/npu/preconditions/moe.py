"""Conditions of the routing operators: permute, unpermute, their backwards, and init_routing_v2."""
from __future__ import annotations

import torch
from torch import Tensor

from ep_fx.targets.npu.preconditions.build import (
    FLOATS,
    INDICES,
    Op,
    Size,
    Words,
    count,
    dim,
    number,
    numel,
    place,
    product,
)
from ep_fx.targets.npu.preconditions.condition import Arguments, Look, Seen

MAX_INDICES, MAX_TOP_K, MAX_EXPERTS = 16777215, 512, 10240
_words = Words("torch_npu 2.13.0 _op_plugin_docs.py")
_aclnn = Words("CANN ops-transformer, aclnnMoeTokenPermute / aclnnMoeTokenUnpermute")
_int32 = "ids are int32 here: convert them with .to(torch.int32)"


def _single(arguments: Arguments) -> Seen | None:
    """Without probs the kernel takes topK to be 1, whatever the caller means: one row for each index comes out."""
    indices, result = place(arguments, "sorted_indices"), place(arguments, "result")
    if place(arguments, "probs") is not None or not isinstance(indices, Tensor) or not isinstance(result, Tensor):
        return None
    rows, wanted = indices.shape[0], result.shape[0]
    return Seen(rows == wanted, f"{rows} indices, and a result of {wanted} rows is wanted")


def _rows_equal_indices(arguments: Arguments) -> Seen | None:
    """Without probs, each index has a row."""
    rows, indices = place(arguments, "permuted_tokens"), place(arguments, "sorted_indices")
    if place(arguments, "probs") is not None or not isinstance(rows, Tensor) or not isinstance(indices, Tensor):
        return None
    return Seen(rows.shape[0] == indices.shape[0], f"{rows.shape[0]} rows, {indices.shape[0]} indices")


def _every_choice(arguments: Arguments) -> Seen | None:
    """With probs, tokens * topK indices."""
    probs, indices = place(arguments, "probs"), place(arguments, "sorted_indices")
    if not isinstance(probs, Tensor) or not isinstance(indices, Tensor) or probs.dim() != 2:
        return None
    tokens, top_k = probs.shape
    return Seen(tokens * top_k == indices.shape[0], f"{tokens} tokens * {top_k}, {indices.shape[0]} indices")


def _enough_rows(arguments: Arguments) -> Seen | None:
    """With probs, each index has a row; there may be more, which nobody reads."""
    rows, indices = place(arguments, "permuted_tokens"), place(arguments, "sorted_indices")
    if place(arguments, "probs") is None or not isinstance(rows, Tensor) or not isinstance(indices, Tensor):
        return None
    return Seen(rows.shape[0] >= indices.shape[0], f"{rows.shape[0]} rows, {indices.shape[0]} indices")


def _rows_for_probs(arguments: Arguments) -> Seen | None:
    """The gradient of probs is made of the rows."""
    if place(arguments, "probs") is None:
        return None
    return Seen(place(arguments, "permuted_tokens") is not None, "probs without them")


def _gradients(arguments: Arguments) -> Seen | None:
    """One row of gradients for each token: of probs, or without them of each index."""
    grad, probs, indices = (place(arguments, n) for n in ("grad_unpermuted_tokens", "probs", "sorted_indices"))
    tokens = indices if probs is None else probs
    if not isinstance(grad, Tensor) or not isinstance(tokens, Tensor):
        return None
    return Seen(grad.shape[0] == tokens.shape[0], f"{grad.shape[0]} rows, {tokens.shape[0]} tokens")


def _dtype_argument(name: str, tensor: str) -> Look:
    def look(arguments: Arguments) -> Seen | None:
        wanted, given = arguments.get(name), place(arguments, tensor)
        return Seen(wanted is given.dtype, f"{wanted} for {given.dtype}") if isinstance(given, Tensor) else None

    return look


def _active_range(arguments: Arguments) -> Seen | None:
    start, end = tuple(arguments["active_expert_range"] or (0, 0))[:2]
    experts = arguments["expert_num"]
    return Seen(0 <= start < end <= experts, f"[{start}, {end}] of {experts} experts")


_padded = _words.value("padded_mode", False)
_sorted = (
    _words.dtype("sorted_indices", torch.int32, remedy=_int32),
    _words.rank("sorted_indices", 1),
    _words.below(numel("sorted_indices"), MAX_INDICES, "indices"),
)
_unpermuted = (
    _padded,
    _words.dtype("probs", *FLOATS),
    _words.rank("probs", 2),
    _words.at_most(dim("probs", 1), MAX_TOP_K, "experts a token (topK)"),
    _words.that("probs", "one index for each token and choice", _every_choice, "pass tokens * topK indices"),
    _words.absent("restore_shape"),
)

OPS = (
    Op(
        "npu_moe_token_permute",
        "tokens indices num_out_tokens padded_mode=False",
        (
            _words.dtype("tokens", *FLOATS),
            _words.rank("tokens", 2),
            _words.dtype("indices", *INDICES),
            _words.rank("indices", 1, 2),
            _words.equal(dim("indices", 0), dim("tokens", 0), "one row of ids for each token"),
            _words.below(numel("indices"), MAX_INDICES, "indices"),
            _words.at_most(dim("indices", 1), MAX_TOP_K, "experts a token (topK)"),
            _words.absent("num_out_tokens"),
            _padded,
        ),
    ),
    Op(
        "npu_moe_token_permute_grad_v2",
        "grad_permuted_tokens sorted_indices tokens_size_0 tokens_dtype num_topK padded_mode=False",
        (
            _words.dtype("grad_permuted_tokens", *FLOATS),
            _words.rank("grad_permuted_tokens", 2),
            *_sorted,
            _words.at_least(number("num_topK"), 1, "experts a token (topK)"),
            _words.at_most(number("num_topK"), MAX_TOP_K, "experts a token (topK)"),
            _words.equal(product(number("tokens_size_0"), number("num_topK")), numel("sorted_indices"),
                         "one index for each token and choice"),
            _words.equal(dim("grad_permuted_tokens", 0), numel("sorted_indices"), "one row for each index"),
            _words.that("tokens_dtype", "the dtype of grad_permuted_tokens",
                        _dtype_argument("tokens_dtype", "grad_permuted_tokens"), "convert the result"),
            _padded,
        ),
    ),
    Op(
        "npu_moe_token_unpermute",
        "permuted_tokens sorted_indices probs padded_mode=False restore_shape",
        (
            _words.dtype("permuted_tokens", *FLOATS),
            _words.rank("permuted_tokens", 2),
            *_sorted,
            _aclnn.that("sorted_indices", "without probs topK is 1, one index for each row", _rows_equal_indices,
                        "pass probs for topK > 1"),
            _aclnn.that("probs", "without probs topK is 1, one row of the result for each index", _single,
                        "pass probs for topK > 1: nothing is added up without them"),
            _words.that("permuted_tokens", "with probs, a row for each index", _enough_rows, "pass all of the rows"),
            *_unpermuted,
        ),
    ),
    Op(
        "npu_moe_token_unpermute_grad_v2",
        "grad_unpermuted_tokens sorted_indices permuted_tokens_size_0 permuted_tokens_dtype probs padded_mode=False "
        "restore_shape permuted_tokens",
        (
            _words.dtype("grad_unpermuted_tokens", *FLOATS),
            _words.rank("grad_unpermuted_tokens", 2),
            *_sorted,
            _words.dtype("permuted_tokens", *FLOATS),
            _words.rank("permuted_tokens", 2),
            _words.same_dtype("permuted_tokens", "grad_unpermuted_tokens"),
            _words.that("permuted_tokens", "with probs, the rows that forward had", _rows_for_probs, "pass them"),
            _words.equal(dim("permuted_tokens", 0), number("permuted_tokens_size_0"), "its rows"),
            _words.equal(dim("permuted_tokens", 1), dim("grad_unpermuted_tokens", 1), "as many columns"),
            _words.equal(number("permuted_tokens_size_0"), numel("sorted_indices"), "one row for each index"),
            _words.that("permuted_tokens_dtype", "the dtype of grad_unpermuted_tokens",
                        _dtype_argument("permuted_tokens_dtype", "grad_unpermuted_tokens"), "convert the result"),
            _words.that("grad_unpermuted_tokens", "one row for each token", _gradients, "pass those of the result"),
            *_unpermuted,
        ),
    ),
    Op(
        "npu_moe_init_routing_v2",
        "x expert_idx scale offset active_num=-1 expert_capacity=-1 expert_num=-1 drop_pad_mode=0 "
        "expert_tokens_num_type=0 expert_tokens_num_flag=False quant_mode=-1 active_expert_range=() row_idx_type=0 "
        "x_dtype",
        (
            _words.dtype("x", *FLOATS),
            _words.rank("x", 2),
            _words.dtype("expert_idx", torch.int32, remedy=_int32),
            _words.rank("expert_idx", 2),
            _words.equal(dim("expert_idx", 0), dim("x", 0), "one row of ids for each token"),
            _words.at_least(number("expert_num"), 1, "experts"),
            _words.at_most(number("expert_num"), MAX_EXPERTS, "experts"),
            _words.value("drop_pad_mode", 0),
            _words.value("expert_tokens_num_type", 1, 2),
            _words.value("expert_tokens_num_flag", True),
            _words.value("quant_mode", -1),
            _words.equal(count("active_expert_range"), Size("2", lambda _: 2), "first expert and end"),
            _words.that("active_expert_range", "a range of the experts", _active_range, "pass [0, expert_num]"),
        ),
    ),
)
