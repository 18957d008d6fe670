"""Rules live, once, saved: gathered parameters exist from their unshard to their reshard, once in each direction."""
from __future__ import annotations

import operator

import pytest
import torch

from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, erase, name_of, replace_argument
from tests.verify.builder import Step

aten, ops = torch.ops.aten, torch.ops.ep_fx
live, once, saved = Breaks("live"), Breaks("once"), Breaks("saved")


# -- live ----------------------------------------------------------------------------------------------------------
@live()
@live(rows=6)
@live(keep=True)
def r20_reshard_before_use_through_a_view(step: Step) -> None:
    step["first_t"].append(step["reshard_first_forward"])


@live()
def use_after_reshard_through_undeclared_aliases(step: Step) -> None:
    with step.after(step["reshard_first_forward"]):
        late = step.call(aten.add.Tensor, step["h"], 1, name="late")
    with step.after(step["first_t"]):
        view = step.call(aten._unsafe_view.default, step["first_t"], [8, 8], name="flat")
    with step.after(view):
        piece = step.call(aten.unsafe_split.Tensor, view, 4, name="pieces")
    with step.after(piece):
        step.call(operator.getitem, piece, 0, name="piece")
    replace_argument(late, 1, step["piece"])


@live()
def use_before_the_wait(step: Step) -> None:
    wait, first = step["wait_first_forward"], step["first_t"]
    with step.after(step["unshard_first_forward"]):
        early = step.call(operator.getitem, step["unshard_first_forward"], 0, name="early")
    replace_argument(first, 0, early)
    wait.prepend(first)
    wait.prepend(step["h"])


@live()
@live(rows=6)
def use_of_the_shard_itself(step: Step) -> None:
    replace_argument(step["first_t"], 0, step["first_weight"])


@live(rows=6)
def use_of_the_padded_shard(step: Step) -> None:
    replace_argument(step["first_t"], 0, step["pad_first_forward"])


@live()
@live(keep=True)
def gathered_value_in_the_output(step: Step) -> None:
    output = step.graph.output
    output.args = (((step["last_t"],), *output.args[0][1:]),)


@live()
def reshard_of_a_shard(step: Step) -> None:
    replace_argument(step["reshard_first_forward"], 0, [step["first_weight"]])


@live(rows=6)
def reshard_of_an_assembled_value_before_use(step: Step) -> None:
    step["first_t"].prepend(step["reshard_first_forward"])


@live()
def r46_missing_backward_gather(step: Step) -> None:
    _drop_backward_gather(step)


def _drop_backward_gather(step: Step) -> None:
    step["full_last_weight_backward"].replace_all_uses_with(step["full_last_weight_forward"])
    for name in ("reshard_last_backward", "full_last_weight_backward", "wait_last_backward", "unshard_last_backward"):
        erase(step[name])


# -- once ----------------------------------------------------------------------------------------------------------
@once()
def missing_backward_gather_with_forward_kept(step: Step) -> None:
    _drop_backward_gather(step)
    step["grad_last"].append(step["reshard_last_forward"])


@once()
@once(keep=True)
def gathered_twice(step: Step) -> None:
    with step.after(step["unshard_first_forward"]):
        twice = step.call(ops.unshard.default, [step["first_weight"]], 4, "fsdp_ep", name="twice")
    with step.after(twice):
        step.call(ops.unshard_wait.default, twice, name="twice_wait")


@once()
@once(rows=6)
def never_resharded(step: Step) -> None:
    erase(step["reshard_last_forward"])


@once()
def one_of_two_never_resharded(step: Step) -> None:
    reshard = step["reshard_block_experts_backward"]
    replace_argument(reshard, 0, reshard.args[0][:1])


@once()
def resharded_twice(step: Step) -> None:
    with step.after(step["reshard_first_forward"]):
        step.call(ops.reshard.default, [step["full_first_weight_forward"]], name="again")


@once()
def gathered_over_the_wrong_group(step: Step) -> None:
    replace_argument(step["unshard_block_experts_forward"], 2, "ep")


@once()
def gathered_with_the_wrong_world_size(step: Step) -> None:
    replace_argument(step["unshard_first_forward"], 1, 2)


@once()
def an_input_is_gathered(step: Step) -> None:
    replace_argument(step["unshard_first_forward"], 0, [step["x"]])


@once(rows=6)
def padded_to_the_wrong_size(step: Step) -> None:
    replace_argument(step["pad_first_forward"], 2, 3)


@once(rows=6)
def gathered_without_padding(step: Step) -> None:
    replace_argument(step["unshard_first_forward"], 0, [step["first_weight"]])


@once(rows=6)
def blocks_taken_for_the_parameter(step: Step) -> None:
    replace_argument(step["first_t"], 0, step["full_first_weight_forward"])


@once(rows=6)
def assembled_with_the_wrong_sizes(step: Step) -> None:
    replace_argument(step["whole_first_weight_forward"], 2, [2, 2, 2, 2])


@once()
def a_unit_gathered_in_two_parts(step: Step) -> None:
    unshard = step["unshard_block_experts_forward"]
    first, second = unshard.args[0]
    replace_argument(unshard, 0, [first])
    with step.after(step["wait_block_experts_forward"]):
        part = step.call(ops.unshard.default, [second], 2, "fsdp", name="part")
    with step.after(part):
        done = step.call(ops.unshard_wait.default, part, name="part_wait")
    item = step["full_block_experts_w2_forward"]
    done.append(item)
    item.args = (done, 0)


# -- saved ---------------------------------------------------------------------------------------------------------
@saved()
@saved(rows=6)
def a_view_of_a_gathered_parameter_kept_for_backward(step: Step) -> None:
    with step.before(step["grad_y"]):
        again = step.call(aten.t.default, step["last_t"], name="again")
    replace_argument(step["grad_y"], 1, again)


@saved()
def the_gathered_parameter_kept_for_backward(step: Step) -> None:
    _drop_backward_gather(step)


@once()
@once(policy="early")
@once(keep=True)
def a_unit_kept_after_its_last_use(step: Step) -> None:
    reshard = next(n for n in step.fx.nodes if n.name.startswith("reshard_block") and n.next.op != "output")
    place = reshard.next
    while not place.name.startswith(("y", "out", "act_backward", "grad_h_t", "unpermute_backward")):
        place = place.next
    place.append(reshard)


@pytest.mark.parametrize("case", [*live.cases, *once.cases, *saved.cases], ids=name_of)
def test_is_caught(case: Case) -> None:
    case.run()


def test_the_message_shows_the_alias_path() -> None:
    step = Step()
    r20_reshard_before_use_through_a_view(step)
    text = verify(step.graph, ["live"]).explain()
    assert "%h reads it through %full_first_weight_forward -> %first_t" in text
    assert "no use of first.weight after %reshard_first_forward frees it" in text


def test_padded_blocks_may_be_freed_once_they_are_assembled() -> None:
    step = Step(rows=6)
    with step.after(step["whole_first_weight_forward"]):
        step.call(ops.reshard.default, [step["full_first_weight_forward"]], name="blocks")
    assert verify(step.graph).ok
    step["full_first_weight_forward"].append(step["blocks"])
    assert "live" in verify(step.graph).broken


def test_what_is_kept_by_policy_may_be_saved() -> None:
    step = Step(keep=True)
    with step.before(step["grad_y"]):
        again = step.call(aten.t.default, step["last_t"], name="again")
    replace_argument(step["grad_y"], 1, again)
    step.record()
    assert verify(step.graph).ok
