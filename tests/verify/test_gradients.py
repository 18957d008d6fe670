"""Rules reduce-once and divisor: the sums and the division of every gradient are those that the mesh asks for."""
from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, erase, name_of, replace_argument, set_gradient
from tests.verify.builder import TOKENS, Step

aten, ops, c10d = torch.ops.aten, torch.ops.ep_fx, torch.ops._c10d_functional
once, divisor = Breaks("reduce-once"), Breaks("divisor")


# -- reduce-once ---------------------------------------------------------------------------------------------------
@once()
@once(replicate=2)
def f3_experts_summed_over_ep_as_well(step: Step) -> None:
    """F3: the exchange brought the tokens of the whole ep group already."""
    with step.after(step["reduce_block_experts_wait"]):
        more = step.call(ops.all_reduce_grad.default, step["reduce_block_experts_wait"], "ep", name="more")
    with step.after(more):
        done = step.call(ops.reduce_grad_wait.default, more, name="more_wait")
    target = "all_reduce_block_experts" if step.mesh.size("replicate") > 1 else "scale_block_experts"
    replace_argument(step[target], 0, done)


@once()
def f3_experts_scattered_over_all_ranks(step: Step) -> None:
    reduce = step["reduce_block_experts"]
    reduce.args = (reduce.args[0], 4, "fsdp_ep")


@once()
def summed_twice_over_the_same_ranks(step: Step) -> None:
    with step.after(step["reduce_first_wait"]):
        more = step.call(ops.all_reduce_grad.default, step["reduce_first_wait"], "fsdp_ep", name="more")
    with step.after(more):
        done = step.call(ops.reduce_grad_wait.default, more, name="more_wait")
    replace_argument(step["scale_first"], 0, done)


@once()
def not_reduced_at_all(step: Step) -> None:
    step.graph.set_gradients({"last.weight": step["grad_last"]})
    for name in ("shard_last_weight", "scale_last", "reduce_last_wait", "reduce_last"):
        erase(step[name])


@once(replicate=2)
def not_summed_over_replicas(step: Step) -> None:
    replace_argument(step["scale_first"], 0, step["reduce_first_wait"])
    erase(step["all_reduce_first_wait"])
    erase(step["all_reduce_first"])


@once(fsdp=1, ep=1, replicate=2)
def replicas_not_summed_where_nothing_is_sharded(step: Step) -> None:
    replace_argument(step["scale_first"], 0, [step["grad_first"]])
    erase(step["all_reduce_first_wait"])
    erase(step["all_reduce_first"])


@once()
def summed_with_the_wrong_world_size(step: Step) -> None:
    replace_argument(step["reduce_first"], 1, 2)


@once()
def summed_but_not_scattered(step: Step) -> None:
    reduce = step["reduce_first"]
    with step.after(reduce):
        whole = step.call(ops.all_reduce_grad.default, reduce.args[0], "fsdp_ep", name="whole")
    erase(reduce, instead=whole)


@once(frozen=("first.weight",))
def a_frozen_parameter_is_reduced(step: Step) -> None:
    reduce = step["reduce_last"]
    replace_argument(reduce, 0, [*reduce.args[0], step["grad_first"]])


@once()
@once(ep=1)
@once(sharded=False)
def gradient_turned_into_zeros(step: Step) -> None:
    grad = step["grad_first"]
    with step.after(grad):
        zeros = step.call(aten.zeros.default, [8, 8], name="zeros")
    erase(grad, instead=zeros)


@once(sharded=False)
def gradient_turned_into_full_of_zeros(step: Step) -> None:
    with step.after(step["grad_last"]):
        zeros = step.call(aten.full.default, [8, 1], 0, name="zeros")
    with step.after(zeros):
        wide = step.call(aten.expand.default, zeros, [8, 8], name="wide")
    set_gradient(step, "last.weight", wide)


@once()
def gradient_turned_into_zeros_of_its_own_shape(step: Step) -> None:
    with step.after(step["grad_last"]):
        zeros = step.call(aten.zeros_like.default, step["grad_last"], name="zeros")
    replace_argument(step["reduce_last"], 0, [zeros])


@once(sharded=False)
def gradient_that_depends_on_no_tangent(step: Step) -> None:
    set_gradient(step, "last.weight", step["y"])


@once(sharded=False)
def no_gradient(step: Step) -> None:
    set_gradient(step, "last.weight", None)


@once()
def reduced_by_torchs_own_operator(step: Step) -> None:
    with step.before(step["reduce_first"]):
        summed = step.call(c10d.all_reduce.default, step["grad_first"], "sum", "fsdp_ep", name="summed")
        done = step.call(c10d.wait_tensor.default, summed, name="summed_wait")
    replace_argument(step["reduce_first"], 0, [done])


@once()
@once(sharded=False)
def reduced_on_the_way_through_the_model(step: Step) -> None:
    """A tensor-parallel style that sums the input's gradient over a data dimension."""
    with step.after(step["permute_backward"]):
        summed = step.call(c10d.all_reduce.default, step["permute_backward"], "sum", "ep", name="summed")
    with step.after(summed):
        done = step.call(c10d.wait_tensor.default, summed, name="summed_wait")
    replace_argument(step["grad_h"], 0, done)


@once(rows=6)
def blocks_not_padded_before_the_sum(step: Step) -> None:
    replace_argument(step["reduce_first"], 0, [step["grad_first"]])


@once(rows=6)
def blocks_cut_with_other_sizes(step: Step) -> None:
    replace_argument(step["cut_first_weight"], 2, [2, 2, 2, 2])


@once(rows=6)
def padding_left_in_the_gradient(step: Step) -> None:
    set_gradient(step, "first.weight", step["shard_first_weight"])


@once(fsdp=1)
def summed_over_the_group_of_tokens(step: Step) -> None:
    replace_argument(step["reduce_first"], 2, TOKENS)


@once()
def reduced_over_a_group_of_no_mesh(step: Step) -> None:
    replace_argument(step["reduce_first"], 2, "17")


# -- divisor -------------------------------------------------------------------------------------------------------
@divisor()
@divisor(fsdp=1)
def experts_divided_by_the_size_of_their_group(step: Step) -> None:
    """The field's recurring silent bug: right for dense parameters, wrong for experts."""
    replace_argument(step["scale_block_experts"], 1, float(step.mesh.size("fsdp")))


@divisor()
def not_divided(step: Step) -> None:
    erase(step["scale_first"], instead=step["reduce_first_wait"])


@divisor()
def divided_twice(step: Step) -> None:
    with step.after(step["scale_first"]):
        step.call(ops.scale_grad.default, step["scale_first"], 4.0, name="again")
    step["shard_first_weight"].args = (step["again"], 0)


@divisor()
def divided_once_more_by_torch(step: Step) -> None:
    with step.after(step["shard_first_weight"]):
        step.call(aten.div.Tensor, step["shard_first_weight"], 2.0, name="half")
    set_gradient(step, "first.weight", step["half"])


@divisor(grad_reduce="sum")
def a_mean_where_a_sum_is_asked_for(step: Step) -> None:
    with step.after(step["shard_first_weight"]):
        step.call(aten.mul.Tensor, step["shard_first_weight"], 0.25, name="quarter")
    set_gradient(step, "first.weight", step["quarter"])


@pytest.mark.parametrize("case", [*once.cases, *divisor.cases], ids=name_of)
def test_is_caught(case: Case) -> None:
    case.run()


def test_division_by_torch_instead_of_scale_grad_is_fine() -> None:
    step = Step()
    with step.after(step["reduce_first_wait"]):
        step.call(operator.getitem, step["reduce_first_wait"], 0, name="element")
    with step.after(step["element"]):
        step.call(aten.div.Tensor, step["element"], 4, name="quarter")
    set_gradient(step, "first.weight", step["quarter"])
    erase(step["shard_first_weight"])
    erase(step["scale_first"])
    assert verify(step.graph, ["reduce-once", "divisor", "wait"]).ok


def test_the_models_own_division_is_not_counted() -> None:
    step = Step()
    with step.after(step["grad_first"]):
        step.call(aten.div.Tensor, step["grad_first"], 3.0, name="third")
    replace_argument(step["reduce_first"], 0, [step["third"]])
    step.record()
    assert verify(step.graph).ok


def test_zeros_are_the_gradient_where_capture_found_zeros() -> None:
    """An unused parameter, or one that only moves the choice of experts: the Manifest says which."""
    step = Step()
    gradient_turned_into_zeros(step)
    step.record()
    manifest = step.graph.manifest
    step.graph.manifest = replace(manifest, zero_gradients=("last.weight",))
    assert not verify(step.graph, ["reduce-once"]).ok
    step.graph.manifest = replace(manifest, zero_gradients=("first.weight",))
    assert verify(step.graph).ok
