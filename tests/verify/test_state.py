"""Rule no-state: nothing is read or written but placeholders and the graph's own values."""
from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from ep_fx.verify import verify
from tests.verify.breaking import Breaks, Case, name_of, replace_argument
from tests.verify.builder import Step

aten, ops = torch.ops.aten, torch.ops.ep_fx
broken = Breaks("no-state")
KEPT: list[Any] = []


def keep(value: Any) -> Any:
    """A function of somebody else's, with a global."""
    KEPT.append(value)
    return value


@broken()
def st1_state_read_from_an_attribute(step: Step) -> None:
    """ST-1: what dispatch left on the module."""
    with step.before(step["h"]):
        state = step.fx.create_node("get_attr", "experts.input_splits")
    replace_argument(step["combine"], 1, state)


@broken()
def st1_state_written_to_an_attribute(step: Step) -> None:
    with step.after(step["dispatch_end"]):
        step.call(setattr, step["dispatch_end"], "state", step["context"])


@broken()
def a_submodule_is_called(step: Step) -> None:
    with step.after(step["h"]):
        step.fx.create_node("call_module", "experts", (step["h"],))


@broken()
def a_method_is_called(step: Step) -> None:
    with step.after(step["h"]):
        step.fx.create_node("call_method", "add_", (step["h"], 1))


@broken()
def a_function_with_a_global(step: Step) -> None:
    with step.after(step["h"]):
        replace_argument(step["scores"], 0, step.call(keep, step["h"]))


@broken()
def a_bound_method_as_target(step: Step) -> None:
    with step.after(step["h"]):
        step.call(KEPT.append, step["h"])


@broken()
def a_lambda_as_target(step: Step) -> None:
    with step.after(step["h"]):
        replace_argument(step["scores"], 0, step.call(lambda x: x, step["h"]))


@broken()
def an_overload_packet_as_target(step: Step) -> None:
    step["h"].target = aten.mm


@broken()
def an_element_is_set(step: Step) -> None:
    with step.after(step["h"]):
        step.call(operator.setitem, step["h"], 0, 0)


@broken()
def a_captured_tensor(step: Step) -> None:
    with step.after(step["h"]):
        replace_argument(step["scores"], 0, step.call(aten.add.Tensor, step["h"], torch.ones(1)))


@broken()
def a_captured_object_in_a_list(step: Step) -> None:
    replace_argument(step["exchange_counts"], 1, [2, object()])


@broken()
@broken(sharded=False)
def a_parameter_is_written(step: Step) -> None:
    with step.before(step["h"]):
        step.call(aten.mul_.Scalar, step["first_t"], 2)


@broken()
def an_input_is_written(step: Step) -> None:
    with step.after(step["h"]):
        step.call(aten.zero_.default, step["x"])


@broken()
def a_constant_is_written(step: Step) -> None:
    step.graph.constants["table"] = torch.ones(3)
    with step.before(step["h"]):
        table = step.fx.create_node("get_attr", "table")
        step.call(aten.add_.Scalar, step.call(aten.view.default, table, [3]), 1)


@pytest.mark.parametrize("case", broken.cases, ids=name_of)
def test_is_caught(case: Case) -> None:
    case.run()


def test_constants_sizes_and_own_memory_are_fine() -> None:
    step = Step()
    step.graph.constants["table"] = torch.ones(3)
    with step.before(step["scores"]):
        step.fx.create_node("get_attr", "table")
        size = step.call(aten.sym_size.int, step["h"], 0)
        size = step.call(operator.mul, size, 2)
        size = step.call(torch.sym_max, size, 3)
        fresh = step.call(aten.empty.memory_format, [size, 3])
        step.call(aten.zero_.default, fresh)
        step.call(aten.slice.Tensor, fresh, 0, 0, 9223372036854775807)
    assert verify(step.graph).ok, verify(step.graph).explain()
