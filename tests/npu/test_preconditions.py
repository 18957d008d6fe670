"""Conditions of the npu kernels: the calls that torch_npu's Meta kernels let pass, by name of the operator."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ep_fx.targets.npu.preconditions import OPS, check
from ep_fx.testing.npu.shim import schemas

INT64 = torch.int64


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ids(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def gmm(x: Tensor, weight: Tensor, groups: Tensor, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    usual = {"group_list": groups, "group_list_type": 1, "group_type": 0, "split_item": 3}
    return ([x], [weight]), usual | options


def a2a(world: int, counts: int) -> tuple[Any, ...]:
    return rows(8, 8), rows(2, 8, 4), "g", world, [2] * counts, [2] * counts


TWO = ids(2, dtype=INT64)
ROUTING = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [0, 4]}
GOOD = gmm(rows(8, 8), rows(2, 8, 4), TWO)

# op, (args, kwargs), what the caller takes the result to be, the sentence
LAX = {
    "float64 tokens": ("npu_moe_token_permute", ((rows(4, 8, dtype=torch.float64), ids(4, 2)), {}), None,
                       "expected tokens: torch.float16 or torch.bfloat16 or torch.float32, got torch.float64"),
    "rows of ids": ("npu_moe_token_permute", ((rows(4, 8), ids(7, 2)), {}), None,
                    "one row of ids for each token, indices.shape[0] == tokens.shape[0], got indices.shape[0] = 7, "
                    "tokens.shape[0] = 4"),
    "padded mode": ("npu_moe_token_permute", ((rows(4, 8), ids(4, 2), None, True), {}), None,
                    "expected padded_mode: False, got True"),
    "3-D tokens": ("npu_moe_token_permute", ((rows(1, 4, 8), ids(4, 2)), {}), None,
                   "expected tokens: 2-D, got 3-D, bfloat16[1, 4, 8]"),
    "int64 sorted_indices": ("npu_moe_token_unpermute", ((rows(8, 8), ids(8, dtype=INT64), rows(4, 2)), {}), None,
                             "expected sorted_indices: torch.int32, got torch.int64"),
    "no probs, topK 2": ("npu_moe_token_unpermute", ((rows(8, 8), ids(8)), {}), rows(4, 8),
                         "without probs topK is 1, one row of the result for each index, got 8 indices, and a result "
                         "of 4 rows is wanted"),
    "int32 group_list": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), ids(2)), None,
                         "expected group_list: torch.int64, got torch.int32"),
    "no group_type": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), TWO, group_type=None), None,
                      "expected group_type: stated explicitly, the dimension of the groups, got None"),
    "group_type 1": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), TWO, group_type=1), None,
                     "expected group_type: 0 or 2, got 1"),
    "K": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 5, 4), TWO), None,
          "expected weight: the columns of x, got weight[0].shape[1] = 5, x[0].shape[1] = 8"),
    "length of group_list": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), ids(7, dtype=INT64)), None,
                             "expected group_list: one entry for each local expert, got group_list.shape[0] = 7, "
                             "weight[0].shape[0] = 2"),
    "mixed dtypes": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4, dtype=torch.float32), TWO), None,
                     "one dtype for x and weight, got torch.bfloat16 and torch.float32"),
    "inner dimension": ("npu_grouped_matmul", gmm(rows(8, 70000), rows(2, 70000, 4), TWO), None,
                        "expected x[0]: below 65536 elements, got x[0].inner dimension = 70000"),
    "int64 expert_idx": ("npu_moe_init_routing_v2", ((rows(4, 8), ids(4, 2, dtype=INT64)), ROUTING), None,
                         "expected expert_idx: torch.int32, got torch.int64"),
    "odd swiglu": ("npu_swiglu", ((rows(4, 7),), {}), None,
                   "expected input: an even number of elements along dim, got input.shape[dim] = 7"),
    "ep_world_size": ("npu_alltoallv_gmm", (a2a(2, 4), {}), None,
                      "expected ep_world_size: 8 or 16 or 32 or 64 or 128, got 2"),
    "length of counts": ("npu_alltoallv_gmm", (a2a(8, 1), {}), None,
                         "expected send_counts: a count for each rank and local expert, len(send_counts) == "
                         "gmm_weight.shape[0] * ep_world_size, got len(send_counts) = 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAX)
def test_what_meta_lets_pass_is_refused(name: str) -> None:
    op, (args, kwargs), result, sentence = LAX[name]
    said = [str(finding) for finding in check(op, args, kwargs, result=result).broken]
    assert any(sentence in text for text in said), said
    assert all(text.startswith(f"{op}: expected ") and "[" in text for text in said)  # operator, and source


def test_there_are_seventeen_and_most_have_one_cause() -> None:
    assert len(LAX) == 17
    causes = {name: len(check(op, *call, result=result).broken) for name, (op, call, result, _) in LAX.items()}
    assert {name: number for name, number in causes.items() if number != 1} == {
        "3-D tokens": 2,  # its rows are not those of the ids either
        "length of counts": 3,  # both counts, and their sum
    }


F32 = torch.float32
HEADS, FEW = rows(2, 4, 8, 16), rows(2, 2, 8, 16)
STATISTICS = {name: rows(2, 4, 8, 8, dtype=F32) for name in ("softmax_max", "softmax_sum")}


def mask(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bool, device="meta")


def attention(**options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (HEADS, FEW, FEW, 4, "BNSD"), options


def attention_grad(**options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (HEADS, FEW, FEW, HEADS, 4, "BNSD"), STATISTICS | {"attention_in": HEADS} | options


def unpermute_grad(grad: Tensor, probs: Tensor | None, given: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (grad, ids(8), 8, torch.bfloat16, probs, False, None, given), {}


def permute_grad(tokens: int, dtype: torch.dtype, top_k: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (rows(8, 8), ids(8), tokens, dtype, top_k), {}


BIAS, ANGLES = rows(2, 4, dtype=F32), rows(1, 1, 8, 16)
MORE: dict[str, tuple[str, tuple[tuple[Any, ...], dict[str, Any]], Tensor | None, str]] = {
    "experts of a bias": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), TWO, bias=[rows(3, 4, dtype=F32)]), None,
                          "bias: one row for each local expert, got bias[0].shape[0] = 3"),
    "columns of a bias": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), TWO, bias=[rows(2, 5, dtype=F32)]), None,
                          "bias: the columns of the result, got bias[0].shape[1] = 5"),
    "bias of an outer product": ("npu_grouped_matmul", gmm(rows(8, 6).t(), rows(8, 4), TWO, group_type=2, bias=[BIAS]),
                                 rows(2, 6, 4), "bias: none for groups of the summed dimension, got one"),
    "list of groups": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), [4, 4]),  # type: ignore[arg-type]
                       None, "group_list: a tensor, whose values nobody waits for, got list [4, 4]"),
    "columns of a product": ("npu_grouped_matmul", GOOD, rows(8, 9), "result: the columns of weight, got "),
    "rows of a product": ("npu_grouped_matmul", GOOD, rows(7, 4), "result: the rows of x, got result.shape[0] = 7"),
    "dtype of a product": ("npu_grouped_matmul", GOOD, rows(8, 4, dtype=F32), "result: the dtype of x, got"),
    "sides of a product": ("npu_grouped_matmul", gmm(rows(8, 6).t(), rows(8, 4), TWO, group_type=2), rows(2, 4, 6),
                                  "result: the columns of weight, got result.shape[2] = 6"),
    "num_out_tokens": ("npu_moe_token_permute", ((rows(4, 8), ids(4, 2), 3), {}), None, "num_out_tokens: None, got"),
    "tokens * topK": ("npu_moe_token_permute_grad_v2", permute_grad(4, torch.bfloat16, 3), None,
                      "tokens_size_0: one index for each token and choice, tokens_size_0 * num_topK == "
                      "sorted_indices.numel(), got tokens_size_0 * num_topK = 12"),
    "topK 0": ("npu_moe_token_permute_grad_v2", permute_grad(4, torch.bfloat16, 0), None,
               "num_topK: at least 1 experts a token (topK), got num_topK = 0"),
    "dtype of the tokens": ("npu_moe_token_permute_grad_v2", permute_grad(4, torch.float32, 2), None,
                            "tokens_dtype: the dtype of grad_permuted_tokens, got torch.float32 for torch.bfloat16"),
    "rows to permute back": ("npu_moe_token_permute_grad_v2", ((rows(7, 8), ids(8), 4, torch.bfloat16, 2), {}), None,
                             "grad_permuted_tokens: one row for each index, "),
    "fewer rows than indices": ("npu_moe_token_unpermute", ((rows(7, 8), ids(8), rows(4, 2)), {}), None,
                                "permuted_tokens: with probs, a row for each index, got 7 rows, 8 indices"),
    "rows of gradients": ("npu_moe_token_unpermute_grad_v2", unpermute_grad(rows(5, 8), rows(4, 2), rows(8, 8)), None,
                          "grad_unpermuted_tokens: one row for each token, got 5 rows, 4 tokens"),
    "probs without rows": ("npu_moe_token_unpermute_grad_v2", unpermute_grad(rows(4, 8), rows(4, 2), None), None,
                           "permuted_tokens: with probs, the rows that forward had, got probs without them"),
    "columns of rows": ("npu_moe_token_unpermute_grad_v2", unpermute_grad(rows(4, 8), rows(4, 2), rows(8, 9)), None,
                        "permuted_tokens: as many columns, "),
    "number of rows": ("npu_moe_token_unpermute_grad_v2", unpermute_grad(rows(4, 8), rows(4, 2), rows(7, 8)), None,
                       "permuted_tokens: its rows, "),
    "dim of swiglu": ("npu_swiglu", ((rows(4, 8), 5), {}), None, "dim: a dimension of input, got dim 5 of 2-D"),
    "rstd": ("npu_rms_norm_backward", ((rows(4, 8), rows(4, 8), rows(8), rows(3, 1, dtype=F32)), {}), None,
             "rstd: one number for each norm, [.., 1], got float32[3, 1], input is bfloat16[4, 8]"),
    "dy": ("npu_rms_norm_backward", ((rows(3, 8), rows(4, 8), rows(8), rows(4, 1, dtype=F32)), {}), None,
           "dy: the shape of input, got bfloat16[3, 8]"),
    "angles that differ": ("npu_rotary_mul", ((HEADS, ANGLES, rows(1, 1, 1, 16)), {}), None, "r2: the shape of r1"),
    "angles of another sequence": ("npu_rotary_mul", ((HEADS, *[rows(1, 1, 9, 16)] * 2), {}), None,
                                   "r1: of each other dimension 1 or the size of input, got bfloat16[1, 1, 9, 16]"),
    "gradient to rotate": ("npu_rotary_mul_backward", ((rows(2, 4, 7, 16), HEADS, ANGLES, ANGLES), {}), None,
                           "grad: the shape of input, got bfloat16[2, 4, 7, 16]"),
    "mask": ("npu_fusion_attention", attention(atten_mask=mask(3, 3)), None,
             "atten_mask: [S, T], or [B or 1, N or 1, S, T], where it is no packed triangle, got bool[3, 3]"),
    "sequences of a mask": ("npu_fusion_attention",
                            attention(atten_mask=mask(3, 1, 8, 8)), None,
                            "got bool[3, 1, 8, 8] for [2, 4, 8, 8]"),
    "dropout": ("npu_fusion_attention", attention(keep_prob=0.5), None, "keep_prob: 1.0, got 0.5"),
    "pse": ("npu_fusion_attention", attention(pse=rows(1)), None, "padding_mask, pse: None, got pse"),
    "sparse_mode": ("npu_fusion_attention", attention(sparse_mode=7), None, "or 3 or 4, got 7"),
    "statistics": ("npu_fusion_attention_grad", attention_grad(softmax_sum=rows(1, dtype=F32)), None,
                   "softmax_sum: [B, N, S, 8], got float32[1] for [2, 4, 8]"),
    "no statistics": ("npu_fusion_attention_grad", attention_grad(softmax_max=None), None, "softmax_max: stated"),
    "gradient of attention": ("npu_fusion_attention_grad", attention_grad(attention_in=FEW), None,
                              "attention_in: the shape of query, got bfloat16[2, 2, 8, 16]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    op, (args, kwargs), result, sentence = MORE[name]
    said = [str(finding) for finding in check(op, args, kwargs, result=result).broken]
    assert any(sentence in text for text in said), said


GOOD_CALLS = {
    "attention": ("npu_fusion_attention", attention(atten_mask=mask(1, 4, 8, 8)),
                  None),
    "attention's gradient": ("npu_fusion_attention_grad", attention_grad(), None),
    "unpermute's gradient": ("npu_moe_token_unpermute_grad_v2", unpermute_grad(rows(4, 8), rows(4, 2), rows(8, 8)),
                             None),
    "ungroup's gradient": ("npu_moe_token_unpermute_grad_v2", unpermute_grad(rows(8, 8), None, None), None),
    "permute's gradient": ("npu_moe_token_permute_grad_v2", permute_grad(4, torch.bfloat16, 2), None),
    "biased product": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 8, 4), TWO, bias=[BIAS]), rows(8, 4)),
    "norm's gradient": ("npu_rms_norm_backward", ((rows(4, 8), rows(4, 8), rows(8), rows(4, 1, dtype=F32)), {}),
                        None),
    "permute": ("npu_moe_token_permute", ((rows(4, 8), ids(4, 2)), {}), None),
    "regroup": ("npu_moe_token_permute", ((rows(4, 8), ids(4)), {}), None),
    "unpermute": ("npu_moe_token_unpermute", ((rows(8, 8), ids(8), rows(4, 2)), {}), rows(4, 8)),
    "ungroup": ("npu_moe_token_unpermute", ((rows(8, 8), ids(8)), {}), rows(8, 8)),
    "product": ("npu_grouped_matmul", GOOD, None),
    "product with a view": ("npu_grouped_matmul", gmm(rows(8, 8), rows(2, 4, 8).mT, TWO), None),
    "weight gradient": ("npu_grouped_matmul", gmm(rows(8, 6).t(), rows(8, 4), TWO, group_type=2), rows(2, 6, 4)),
    "swiglu": ("npu_swiglu", ((rows(4, 8),), {}), None),
    "swiglu backward": ("npu_swiglu_backward", ((rows(4, 4), rows(4, 8)), {}), None),
    "rms_norm": ("npu_rms_norm", ((rows(4, 8), rows(8)), {}), None),
    "rotary": ("npu_rotary_mul", ((rows(2, 4, 6, 8), rows(1, 1, 6, 8), rows(1, 1, 6, 8)), {}), None),
    "accumulated": ("npu_grouped_matmul_add_", ((rows(2, 6, 4, dtype=torch.float32), rows(8, 6), rows(8, 4), TWO),
                                                {"group_list_type": 1}), None),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD_CALLS)
def test_good_calls_pass(name: str) -> None:
    op, (args, kwargs), result = GOOD_CALLS[name]
    assert check(op, args, kwargs, result=result).broken == ()


def test_a_fused_exchange_is_for_a3() -> None:
    counts = [2] * 16
    call = rows(32, 1 << 16), rows(2, 1 << 16, 4), "g", 8, counts, counts
    assert [f.condition.unit for f in check("npu_alltoallv_gmm", call, soc="A3").at_run_time] == ["bytes"]
    assert check("npu_alltoallv_gmm", call, soc="A3").broken == ()
    assert "expected soc: A3, got A2" in str(check("npu_alltoallv_gmm", call, soc="A2").reason)
    assert [f.condition.argument for f in check("npu_alltoallv_gmm", call).at_run_time] == ["soc", "gmm_x"]


def test_real_group_lists_are_added_up() -> None:
    x, weight = torch.zeros(8, 8), torch.zeros(2, 8, 4)
    assert check("npu_grouped_matmul", *gmm(x, weight, torch.tensor([5, 3]))) == check("npu_swiglu", (x,))
    assert "sum(group_list) = 7, x[0].shape[0] = 8" in str(
        check("npu_grouped_matmul", *gmm(x, weight, torch.tensor([5, 2]))).reason
    )


def test_the_kind_of_a_group_list_is_stated() -> None:
    args, kwargs = GOOD
    silent = {name: value for name, value in kwargs.items() if name != "group_list_type"}
    assert "group_list_type: stated explicitly" in str(check("npu_grouped_matmul", args, silent).reason)


def test_unknown_sizes_are_conditions_of_the_run_and_add_no_guard() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        unbacked, other = env.create_unbacked_symint(), env.create_unbacked_symint()
        tokens = torch.empty(unbacked, 8)
        found = check("npu_moe_token_permute", (tokens, torch.empty(other, dtype=torch.int32)))
        same = check("npu_moe_token_permute", (tokens, torch.empty(unbacked, dtype=torch.int32)))
    assert found.broken == same.broken == ()
    assert [f.condition.wants for f in found.at_run_time] == [
        "one row of ids for each token, indices.shape[0] == tokens.shape[0]", "below 16777215 indices",
    ]  # fmt: skip
    assert [f.condition.limit for f in same.at_run_time] == [16777215]
    assert not env.guards


def test_every_line_says_where_it_stands_and_what_to_do() -> None:
    for op in OPS.values():
        assert op.conditions
        for condition in op.conditions:
            assert all((condition.source, condition.remedy, condition.wants)), (op.name, condition)
            assert (condition.limit is None) == (not condition.unit), (op.name, condition)


def test_unknown_operators_and_arguments_are_refused() -> None:
    with pytest.raises(KeyError, match=r"no conditions are known of npu\.npu_gelu"):
        check("npu_gelu", ())
    with pytest.raises(TypeError, match="does not take"):
        check("npu_swiglu", (rows(4, 8),), {"axis": 1})
    with pytest.raises(TypeError, match="does not take"):
        check("npu_swiglu", (rows(4, 8), -1, 3))


def test_parameters_are_those_of_the_frozen_schemas() -> None:
    for name, op in OPS.items():
        arguments = torch._C.parse_schema(f"npu::{schemas()[name]}").arguments if name in schemas() else None
        if arguments is None:
            continue
        words = [word.partition("=") for word in op.parameters.split()]
        assert [word for word, _, _ in words] == [argument.name for argument in arguments], name
        defaults = {a.name: a.default_value for a in arguments}
        given = op.bind([None] * sum(not a.has_default_value() for a in arguments), {})
        assert {n: given[n] for n, equals, _ in words if equals} == {n: defaults[n] for n, equals, _ in words if equals}
