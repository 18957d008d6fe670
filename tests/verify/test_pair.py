"""Rule pair: dispatch, combine and both backwards of one run share one context, and no other run's."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from ep_fx.graph import ParallelGraph
from ep_fx.ops import dispatch_context
from ep_fx.verify import verify
from ep_fx.verify.computation import computation
from tests.verify.breaking import Breaks, Case, erase, name_of, replace_argument
from tests.verify.builder import EXPERTS, REGION, TOKENS, Step

aten, ops, c10d = torch.ops.aten, torch.ops.ep_fx, torch.ops._c10d_functional
broken = Breaks("pair")


# -- lowered exchanges ---------------------------------------------------------------------------------------------
@broken()
def combine_with_the_splits_of_the_way_out(step: Step) -> None:
    step["combine"].args = (step["combine_ungroup"], step.out, step.into, TOKENS)


@broken()
def dispatch_with_swapped_splits(step: Step) -> None:
    step["dispatch"].args = (step["dispatch_send"], step.into, step.out, TOKENS)


@broken()
def combine_backward_with_swapped_splits(step: Step) -> None:
    step["combine_backward"].args = (step["combine_backward_send"], step.into, step.out, TOKENS)


@broken()
def dispatch_backward_with_swapped_splits(step: Step) -> None:
    step["dispatch_backward"].args = (step["dispatch_backward_ungroup"], step.out, step.into, TOKENS)


@broken()
def literal_splits(step: Step) -> None:
    replace_argument(step["combine"], 2, [4, 4])


@broken()
def rows_put_back_by_other_indices(step: Step) -> None:
    replace_argument(step["combine_ungroup"], 1, step["permute_order"])


@broken()
def too_few_rows_sent(step: Step) -> None:
    replace_argument(step["dispatch_send"], 1, step.out)


@broken()
def padded_to_a_literal_shape(step: Step) -> None:
    replace_argument(step["combine_end"], 1, [24])


@broken()
def exchange_over_the_group_of_gathers(step: Step) -> None:
    replace_argument(step["dispatch"], 3, "ep")


@broken()
def counts_not_exchanged(step: Step) -> None:
    replace_argument(step["context"], 1, step["permute_counts"])


@broken()
def other_counts_exchanged(step: Step) -> None:
    replace_argument(step["exchange_counts"], 0, step["topk_ids"])


@broken()
def counts_exchanged_in_unequal_blocks(step: Step) -> None:
    replace_argument(step["exchange_counts"], 1, [1, 3])


@broken()
def exchange_without_its_other_half(step: Step) -> None:
    erase(step["combine_end"], instead=step["combine_wait"])


@broken()
def a_second_combine(step: Step) -> None:
    step.phase = step.phase.FORWARD
    with step.before(step["y"]):
        rows = step.bring_back(step["down"], "combine")
    replace_argument(step["y"], 0, rows)


@broken()
def rows_dispatched_twice(step: Step) -> None:
    with step.after(step["context_counts"]):
        rows = step.call(ops.send_rows.default, step["permute_rows"], step.into, name="again_send")
    with step.after(rows):
        again = step.call(c10d.all_to_all_single.default, rows, step.out, step.into, TOKENS, name="again")
    with step.after(again):
        done = step.call(c10d.wait_tensor.default, again, name="again_wait")
    with step.after(done):
        step.call(ops.regroup.default, done, step.indices, name="again_end")


# -- both forms ----------------------------------------------------------------------------------------------------
@broken()
@broken(ep=1)
def a_region_that_nobody_knows(step: Step) -> None:
    node = step["context"] if step.lowered else step["dispatch"]
    replace_argument(node, 4, "block.other")


@broken()
@broken(ep=1)
def another_ep_size(step: Step) -> None:
    replace_argument(step["context"] if step.lowered else step["dispatch"], 3, 4)


@broken()
@broken(ep=1)
@broken(sharded=False)
def experts_compute_with_a_dense_weight(step: Step) -> None:
    replace_argument(step["up"], 1, step["last_weight"])


@broken()
@broken(ep=1)
def experts_count_the_rows_before_dispatch(step: Step) -> None:
    replace_argument(step["down"], 2, step["permute_counts"])


@broken()
@broken(ep=1)
def backward_counts_the_rows_before_dispatch(step: Step) -> None:
    replace_argument(step["down_backward"], 3, step["permute_counts"])


@broken()
@broken(ep=1)
def combine_of_rows_that_were_not_dispatched(step: Step) -> None:
    replace_argument(step["combine_ungroup"] if step.lowered else step["combine"], 0, step["permute_rows"])


@broken()
@broken(ep=1)
def gradient_that_skips_combine_backward(step: Step) -> None:
    name = "dispatch_backward_ungroup" if step.lowered else "dispatch_backward"
    replace_argument(step[name], 0, step["unpermute_backward_rows"])


@broken()
@broken(ep=1)
def number_of_rows_of_another_tensor(step: Step) -> None:
    replace_argument(step["num_rows"], 0, step["x"])


# -- logical nodes -------------------------------------------------------------------------------------------------
@broken(ep=1)
def splits_and_indices_exchanged(step: Step) -> None:
    combine = step["combine"]
    combine.args = (combine.args[0], step.splits, step.indices, *combine.args[3:])


@broken(ep=1)
def context_from_elsewhere(step: Step) -> None:
    replace_argument(step["combine"], 1, step["permute_order"])
    replace_argument(step["combine"], 2, step["permute_counts"])


@broken(ep=1)
def combine_for_another_region(step: Step) -> None:
    replace_argument(step["combine"], 4, "block.other")


@broken(ep=1)
def combine_backward_twice(step: Step) -> None:
    with step.after(step["combine_backward"]):
        rows = step["unpermute_backward_rows"]
        again = step.call(ops.combine_backward.default, rows, step.indices, step.splits, REGION)
    replace_argument(step["down_backward"], 0, again)


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_is_caught(case: Case) -> None:
    case.run()


# -- two runs of one region: two micro-batches in flight, or a layer that is called twice --------------------------
class TwoRuns:
    """dispatch 1, dispatch 2, combine 1, combine 2 of one region in one forward graph, lowered or not."""

    def __init__(self, lowered: bool, owners: tuple[int, int] = (0, 1)) -> None:
        step = Step(backward=False, sharded=False, lowered=lowered, ep=2 if lowered else 1)
        step.phase = step.phase.FORWARD
        rows, counts = step["permute_rows"], step["permute_counts"]
        first = step["combine_end" if lowered else "combine"]
        contexts = []
        place = step["y"]
        with step.before(place):
            for _ in range(2):
                routed = step.dispatch(rows, counts)
                kept = [getattr(step, n, None) for n in ("indices", "splits", "into", "out", "shape", "num_rows")]
                contexts.append((step.call(aten.relu.default, routed), kept))
            results = []
            for (routed, _), owner in zip(contexts, owners, strict=True):
                step.indices, step.splits, step.into, step.out, step.shape, step.num_rows = contexts[owner][1]
                results.append(step.bring_back(routed, "combine"))
            total = step.call(aten.add.Tensor, *results)
            total = step.call(aten.add.Tensor, total, first)
        replace_argument(place, 0, total)
        manifest = replace(step.graph.manifest, regions=step.graph.manifest.regions * 3)
        self.graph = ParallelGraph(step.fx, manifest, provides=step.graph.provides)
        self.graph.manifest = replace(manifest, computation=computation(self.graph))


@pytest.mark.parametrize("lowered", [False, True])
def test_ss01_two_runs_of_a_region_keep_their_contexts_apart(lowered: bool) -> None:
    assert verify(TwoRuns(lowered).graph).ok, verify(TwoRuns(lowered).graph).explain()


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("owners", [(1, 0), (1, 1), (0, 0)], ids=str)
def test_f1_a_context_of_another_micro_batch_is_caught(lowered: bool, owners: tuple[int, int]) -> None:
    """The fault that started the project: micro-batch 2's dispatch state reaches micro-batch 1's combine."""
    report = verify(TwoRuns(lowered, owners).graph)
    assert "pair" in report.broken
    assert "context" in report.explain()


def test_a_context_mixed_from_two_dispatches_names_both() -> None:
    step = Step()
    with step.after(step["context_counts"]):
        args = (step["permute_counts"], step["counts_done"], step["num_rows"], 2, REGION)
        other = step.call(dispatch_context, *args, name="other")
    with step.after(other):
        splits = step.items(other, "indices", "into")[1]
    replace_argument(step["combine"], 1, splits)
    text = verify(step.graph, ["pair"]).explain()
    assert "input_splits of %context as output splits" in text
    assert "input_splits of %other" in text


def test_a_region_of_two_experts_sets_names_the_foreign_one() -> None:
    step = Step()
    region = step.graph.manifest.regions[0]
    only_one = replace(region, parameters=region.parameters[:1], num_experts=EXPERTS)
    step.graph.manifest = replace(step.graph.manifest, regions=(only_one,))
    text = verify(step.graph, ["pair"]).explain()
    assert "weights of region block.experts: ['block.experts.w1']" in text
    assert "block.experts.w2" in text


def test_weights_are_followed_through_views_and_stacks() -> None:
    step = Step()
    with step.before(step["up"]):
        stacked = step.call(aten.stack.default, [step["full_block_experts_w1_forward"]] * 2)
        viewed = step.call(aten.select.int, stacked, 0, 0)
    replace_argument(step["up"], 1, viewed)
    step.record()
    assert verify(step.graph).ok
    other: fx.Node = step["first_weight"]
    stacked.args = ([step["full_block_experts_w1_forward"], other],)
    assert "pair" in verify(step.graph).broken
