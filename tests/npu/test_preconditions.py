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


GOOD_CALLS = {
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
