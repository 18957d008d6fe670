"""What a kernel refuses, or would compute wrongly without a word: checked on the values of every call.

torch_npu's own Meta kernels pass nearly anything; these checks stand where the device would. A call without rows is
refused too: who emits a kernel answers for empty input (R47).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
_MAX_GROUPS, _MAX_INNER, _MAX_TOP_K, _MAX_CHOICES = 1024, 65535, 512, 16777214
_MAX_HEAD, _MAX_ROTARY_HEAD, _MAX_ROTARY = 768, 895, 999


def require(holds: bool, expected: str, got: object) -> None:
    """Raises ValueError with both where `holds` is false."""
    if not holds:
        raise ValueError(f"expected {expected}, got {got}")


def _floats(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    require(tensor.dtype in dtypes, f"{name} in one of {[str(d) for d in dtypes]}", tensor.dtype)
    require(tensor.numel() > 0, f"{name} with elements (a call without rows does not reach a kernel)", tensor.shape)


def _alike(**tensors: Tensor) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    require(len(set(dtypes.values())) == 1, f"one dtype for {', '.join(tensors)}", dtypes)


def _shape(name: str, tensor: Tensor, *sizes: int) -> None:
    require(tuple(tensor.shape) == sizes, f"{name} of shape {sizes}", tuple(tensor.shape))


def _given(name: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError(f"expected {name}, got None")
    return tensor


# -- routing -----------------------------------------------------------------------------------------------------------
def _permute(tokens: Tensor, indices: Tensor, **_: Any) -> None:
    _floats("tokens", tokens)
    require(tokens.dim() == 2, "tokens [T, H]", tuple(tokens.shape))
    require(indices.dtype in (torch.int32, torch.int64), "indices in int32 or int64", indices.dtype)
    require(indices.dim() in (1, 2), "indices [T] or [T, K]", tuple(indices.shape))
    require(indices.size(0) == tokens.size(0), f"indices of {tokens.size(0)} tokens", tuple(indices.shape))
    require(indices.dim() == 1 or 1 <= indices.size(1) <= _MAX_TOP_K, f"1 <= K <= {_MAX_TOP_K}", tuple(indices.shape))
    require(indices.numel() <= _MAX_CHOICES, f"at most {_MAX_CHOICES} indices", indices.numel())
    require(int(indices.min()) >= 0, "indices of at least 0", int(indices.min()))


def _sorted(sorted_indices: Tensor, choices: int) -> None:
    require(sorted_indices.dtype is torch.int32, "sorted_indices in int32", sorted_indices.dtype)
    _shape("sorted_indices", sorted_indices, choices)
    seen = torch.bincount(sorted_indices.long(), minlength=choices) if int(sorted_indices.min()) >= 0 else None
    whole = seen is not None and seen.numel() == choices and bool((seen == 1).all())
    require(whole, f"sorted_indices with each number below {choices} once", sorted_indices.tolist()[:16])


def _permute_grad(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    **_: Any,
) -> None:
    rows, choices = grad_permuted_tokens, tokens_size_0 * num_topK
    _floats("grad_permuted_tokens", rows)
    require(tokens_dtype is rows.dtype, f"tokens_dtype {rows.dtype}", tokens_dtype)
    _sorted(sorted_indices, choices)
    require(rows.dim() == 2 and rows.size(0) <= choices, f"at most {choices} rows", tuple(rows.shape))


def _probs(probs: Tensor) -> None:
    _floats("probs", probs)
    require(probs.dim() == 2 and probs.size(1) <= _MAX_TOP_K, f"probs [T, K <= {_MAX_TOP_K}]", tuple(probs.shape))


def _unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, restore_shape: object, **_: Any
) -> None:
    rows = permuted_tokens
    _floats("permuted_tokens", rows)
    require(rows.dim() == 2, "permuted_tokens [n, H]", tuple(rows.shape))
    require(restore_shape is None, "restore_shape None", restore_shape)
    if probs is not None:
        _probs(probs)
    _sorted(sorted_indices, sorted_indices.numel() if probs is None else probs.numel())
    require(rows.size(0) <= sorted_indices.numel(), f"at most {sorted_indices.numel()} rows", tuple(rows.shape))


def _unpermute_grad(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    permuted_tokens: Tensor | None,
    **_: Any,
) -> None:
    grad, rows = grad_unpermuted_tokens, permuted_tokens_size_0
    _floats("grad_unpermuted_tokens", grad)
    require(permuted_tokens_dtype is grad.dtype, f"permuted_tokens_dtype {grad.dtype}", permuted_tokens_dtype)
    if probs is not None:
        _probs(probs)
        _shape("probs", probs, grad.size(0), probs.size(1))
    _sorted(sorted_indices, grad.size(0) if probs is None else probs.numel())
    require(rows <= sorted_indices.numel(), f"at most {sorted_indices.numel()} rows", rows)
    if probs is not None:
        _shape("permuted_tokens", _given("permuted_tokens, beside probs", permuted_tokens), rows, grad.size(1))


# -- products ----------------------------------------------------------------------------------------------------------
def _grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    group_list: Tensor | None,
    group_type: int | None,
    group_list_type: int,
    **_: Any,
) -> None:
    left, right = x[0], weight[0]
    _floats("x", left)
    _floats("weight", right)
    _alike(x=left, weight=right)
    require(group_type in (0, 2), "group_type 0 or 2", group_type)
    for name, operand in (("x", left), ("weight", right)):
        require(operand.size(-1) <= _MAX_INNER, f"a last dimension of {name} up to {_MAX_INNER}", tuple(operand.shape))
    groups = _groups(_given("group_list", group_list), group_list_type, left.size(1 if group_type == 2 else 0))
    shapes, strides = (tuple(left.shape), tuple(right.shape)), (left.stride(), right.stride())
    if group_type == 2:
        require(left.dim() == right.dim() == 2, "x [M, K] and weight [K, N]", shapes)
        require(left.size(1) == right.size(0), f"weight of {left.size(1)} rows", shapes)
        require(left.t().is_contiguous() and right.is_contiguous(), "x a transposed view, weight contiguous", strides)
        return
    require(left.dim() == 2 and right.dim() == 3, "x [M, K] and weight [G, K, N]", shapes)
    require(right.size(0) == groups, f"one weight for each of {groups} groups", shapes)
    require(right.size(1) == left.size(1), f"weight [G, {left.size(1)}, N]", shapes)
    require(left.is_contiguous(), "x contiguous", strides)
    require(right.is_contiguous() or right.mT.is_contiguous(), "weight contiguous, or a transposed view", strides)
    if bias:
        _shape("bias", bias[0], groups, right.size(2))
        wide = torch.float32 if left.dtype is torch.bfloat16 else left.dtype
        require(bias[0].dtype is wide, f"bias in {wide}", bias[0].dtype)


def _grouped_matmul_add(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    transpose_x: bool,
    transpose_weight: bool,
    group_type: int,
    group_list_type: int,
) -> None:
    require(x.dtype in HALVES, "x in bfloat16 or float16", x.dtype)
    _floats("weight", weight)
    _alike(x=x, weight=weight)
    require(input.dtype is torch.float32, "input in float32", input.dtype)
    shapes = (tuple(x.shape), tuple(weight.shape))
    require(x.dim() == weight.dim() == 2 and x.size(0) == weight.size(0), "x [K, M] and weight [K, N]", shapes)
    kinds = (transpose_x, transpose_weight, group_type)
    require(kinds == (True, False, 2), "transpose_x, no transpose_weight, group_type 2", kinds)
    require(max(x.size(1), weight.size(1)) <= _MAX_INNER, f"last dimensions up to {_MAX_INNER}", shapes)
    _shape("input", input, _groups(group_list, group_list_type, x.size(0)), x.size(1), weight.size(1))


def _groups(group_list: Tensor, kind: int, total: int) -> int:
    """Their number."""
    require(group_list.dtype is torch.int64, "group_list in int64", group_list.dtype)
    require(group_list.dim() == 1, "group_list [G]", tuple(group_list.shape))
    groups = group_list.numel()
    require(1 <= groups <= _MAX_GROUPS, f"1 to {_MAX_GROUPS} groups", groups)
    values: list[int] = group_list.tolist()
    require(kind in (0, 1), "group_list_type 0 (running totals) or 1 (sizes)", kind)
    require(min(values) >= 0, "a group_list of numbers of at least 0", values)
    if kind == 0:
        require(sorted(values) == values and values[-1] == total, f"running totals up to {total}", values)
    else:
        require(sum(values) == total, f"sizes with the sum {total}", values)
    return groups


def _exchange(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    trans_gmm_weight: bool,
    **options: Any,
) -> None:
    shapes = (tuple(gmm_x.shape), tuple(gmm_weight.shape))
    require(gmm_x.dtype in HALVES, "gmm_x in bfloat16 or float16", gmm_x.dtype)
    _alike(gmm_x=gmm_x, gmm_weight=gmm_weight)
    require(gmm_x.dim() == 2 and gmm_weight.dim() == 3, "gmm_x [A, K] and gmm_weight [e, K, N]", shapes)
    require(gmm_weight.size(2 if trans_gmm_weight else 1) == gmm_x.size(1), f"a weight for {gmm_x.size(1)}", shapes)
    expected = gmm_weight.size(0) * ep_world_size
    for counts in (send_counts, recv_counts):
        require(len(counts) == expected and min(counts) >= 0, f"{expected} counts of at least 0", list(counts))
    require(sum(send_counts) == gmm_x.size(0), f"send_counts with the sum {gmm_x.size(0)}", list(send_counts))
    given = [name for name in ("send_counts_tensor", "recv_counts_tensor", "mm_x", "mm_weight") if options.get(name)]
    require(not given, "no second product and no counts as tensors", given)


# -- pointwise ---------------------------------------------------------------------------------------------------------
def _swiglu(input: Tensor, dim: int) -> None:
    _floats("input", input)
    require(input.size(dim) % 2 == 0, f"an even size along {dim}", tuple(input.shape))


def _swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> None:
    _swiglu(input, dim)
    _alike(grad_output=grad_output, input=input)
    sizes = list(input.shape)
    sizes[dim] //= 2
    _shape("grad_output", grad_output, *sizes)


def _rms_norm(input: Tensor, gamma: Tensor, **_: Any) -> None:
    _floats("input", input)
    _alike(input=input, gamma=gamma)
    require(2 <= input.dim() <= 8, "input of 2 to 8 dimensions", tuple(input.shape))
    _shape("gamma", gamma, *input.shape[input.dim() - gamma.dim() :])


def _rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> None:
    _rms_norm(input, gamma)
    _alike(dy=dy, input=input)
    _shape("dy", dy, *input.shape)
    require(rstd.dtype is torch.float32, "rstd in float32", rstd.dtype)
    _shape("rstd", rstd, *input.shape[: input.dim() - gamma.dim()], *[1] * gamma.dim())


def _rotary(input: Tensor, r1: Tensor, r2: Tensor, **_: Any) -> None:
    _floats("input", input)
    _alike(input=input, r1=r1, r2=r2)
    shapes = (tuple(input.shape), tuple(r1.shape), tuple(r2.shape))
    require(input.dim() == r1.dim() == r2.dim() == 4, "4-D tensors", shapes)
    head = input.size(3)
    require(head % 2 == 0 and head <= _MAX_ROTARY_HEAD, f"an even head up to {_MAX_ROTARY_HEAD}", head)
    fits = all(size in (1, whole) for size, whole in zip(r1.shape, input.shape, strict=True))
    require(fits and r1.size(3) == head and r1.shape == r2.shape, "r1 and r2 alike, broadcast to input", shapes)
    require(max(input.size(0), min(input.size(1), input.size(2))) <= _MAX_ROTARY, "B and N below 1000", shapes)


def _rotary_backward(grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, **_: Any) -> None:
    _rotary(input, r1, r2)
    _alike(grad=grad, input=input)
    _shape("grad", grad, *input.shape)


# -- attention ---------------------------------------------------------------------------------------------------------
_PACKED = (2048, 2048)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, atten_mask: Tensor | None,
    sparse_mode: int = 0, **_: Any,
) -> None:  # fmt: skip
    _floats("query", query)
    _floats("key", key)
    _alike(query=query, key=key, value=value)
    require(input_layout == "BNSD", "layout BNSD", input_layout)
    shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
    require(query.dim() == key.dim() == value.dim() == 4, "4-D tensors", shapes)
    batch, heads, length, size = query.shape
    require(head_num == heads, f"head_num {heads}", head_num)
    require(key.shape[:3] == value.shape[:3], "keys and values of one length", shapes)
    require(key.size(0) == batch and key.size(3) == size, f"key [{batch}, N_kv, S_kv, {size}]", shapes)
    require(heads % key.size(1) == 0, f"key heads that divide {heads}", key.size(1))
    require(value.size(3) <= size <= _MAX_HEAD, f"D_v <= D <= {_MAX_HEAD}", shapes)
    if atten_mask is None:
        return
    if sparse_mode == 2:
        require(tuple(atten_mask.shape) == _PACKED, f"atten_mask {_PACKED} with sparse_mode 2", tuple(atten_mask.shape))
        triangle = bool(atten_mask[0, 1:].all()) and not bool(atten_mask[:, 0].any())
        require(triangle, "true above the diagonal only", "another mask")
        return
    require(atten_mask.dtype in (torch.bool, torch.uint8), "atten_mask in bool or uint8", atten_mask.dtype)
    both = (length, key.size(2))
    forms = [(batch, heads, *both), (batch, 1, *both), (1, 1, *both), both]
    require(tuple(atten_mask.shape) in forms, f"atten_mask of a shape in {forms}", tuple(atten_mask.shape))


def _attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    attention_in: Tensor | None,
    **options: Any,
) -> None:
    _attention(query, key, value, **options)
    _alike(dy=dy, query=query)
    _shape("dy", dy, *query.shape[:3], value.size(3))
    for name, given in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum)):
        saved = _given(name, given)
        require(saved.dtype is torch.float32, f"{name} in float32", saved.dtype)
        _shape(name, saved, *query.shape[:3], 8)
    _shape("attention_in", _given("attention_in", attention_in), *dy.shape)


CHECKS: dict[str, Callable[..., None]] = {
    "npu_moe_token_permute": _permute,
    "npu_moe_token_permute_grad_v2": _permute_grad,
    "npu_moe_token_unpermute": _unpermute,
    "npu_moe_token_unpermute_grad_v2": _unpermute_grad,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_grouped_matmul_add_": _grouped_matmul_add,
    "npu_alltoallv_gmm": _exchange,
    "npu_gmm_alltoallv": _exchange,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_rotary_mul": _rotary,
    "npu_rotary_mul_backward": _rotary_backward,
    "npu_fusion_attention": _attention,
    "npu_fusion_attention_grad": _attention_grad,
}
"""By the name of the operator; called with all of its arguments by name; a ValueError says what is wrong."""
