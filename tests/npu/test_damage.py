"""What shapes do not show: rows, orders, weights and waits of a lowered graph put out of place by hand are named."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx

from ep_fx.graph import ParallelGraph, Role, role_of
from ep_fx.targets.npu import check_target
from ep_fx.targets.npu.rule import KEPT
from ep_fx.verify import VerificationError
from tests.npu.lowered import called, hf_for_npu

aten = torch.ops.aten
Damage = Callable[[ParallelGraph], None]


def _with_probs(graph: ParallelGraph, name: str, *, is_given: bool = True) -> list[fx.Node]:
    return [node for node in called(graph, name) if (len(node.args) > 2 and node.args[2] is not None) == is_given]


def _rows_sent(graph: ParallelGraph) -> list[fx.Node]:
    return [node for node in graph if role_of(node) is Role.EXCHANGE and node.meta["val"].dim() == 2]


def _products(graph: ParallelGraph, group_type: int) -> list[fx.Node]:
    found = called(graph, "npu_grouped_matmul")
    return [node for node in found if (node.args[4] if len(node.args) > 4 else 0) == group_type]


def _forward_order_of_another_layer(graph: ParallelGraph) -> None:
    first, second = _with_probs(graph, "npu_moe_token_unpermute")
    second.update_arg(1, first.args[1])


def _received_order_of_another_layer(graph: ParallelGraph) -> None:
    first, second = _with_probs(graph, "npu_moe_token_unpermute", is_given=False)
    second.update_arg(1, first.args[1])


def _backward_order_of_another_layer(graph: ParallelGraph) -> None:
    of_tokens = [node for node in called(graph, "npu_moe_token_permute_grad_v2") if node.args[3] == 2]
    of_tokens[1].update_arg(1, of_tokens[0].args[1])


def _order_of_the_exchange_for_tokens(graph: ParallelGraph) -> None:
    (of_tokens, *_), (of_rows, *_) = (
        _with_probs(graph, "npu_moe_token_unpermute", is_given=is_given) for is_given in (True, False)
    )
    of_tokens.update_arg(1, of_rows.args[1])


def _ids_for_an_order(graph: ParallelGraph) -> None:
    unpermute = _with_probs(graph, "npu_moe_token_unpermute", is_given=False)[0]
    permute = unpermute.args[1].args[0]  # type: ignore[union-attr]
    unpermute.update_arg(1, permute.args[1])  # type: ignore[union-attr]


def _probs_of_another_layer(graph: ParallelGraph) -> None:
    first, second = _with_probs(graph, "npu_moe_token_unpermute")
    second.update_arg(2, first.args[2])


def _no_probs_in_backward(graph: ParallelGraph) -> None:
    backward = _with_probs(graph, "npu_moe_token_unpermute_grad_v2")[0]
    backward.args = backward.args[:2]


def _another_number_of_choices(graph: ParallelGraph) -> None:
    next(node for node in called(graph, "npu_moe_token_permute_grad_v2") if node.args[3] == 2).update_arg(3, 1)


def _no_number_of_tokens(graph: ParallelGraph) -> None:
    next(node for node in called(graph, "npu_moe_token_permute_grad_v2") if node.args[3] == 2).update_arg(2, None)


def _ids_of_another_layer(graph: ParallelGraph) -> None:
    first, _, second, _ = called(graph, "npu_moe_token_permute")
    second.update_arg(1, first.args[1])


def _another_number_of_experts(graph: ParallelGraph) -> None:
    called(graph, "tokens_per_expert")[0].update_arg(1, 7)


def _rows_as_they_arrived(graph: ParallelGraph) -> None:
    product = _products(graph, 0)[0]
    product.update_arg(0, product.args[0].args[0].args[0])  # type: ignore[union-attr]


def _sides_of_an_outer_product(graph: ParallelGraph) -> None:
    product = _products(graph, 2)[0]
    left, right = product.args[0].args[0], product.args[1]  # type: ignore[union-attr]
    assert isinstance(right, fx.Node)
    with graph.graph.inserting_before(product):
        turned = graph.call(aten.t.default, right, like=product, value=right.meta["val"].t())
    product.args = (turned, left, *product.args[2:])


def _splits_exchanged(graph: ParallelGraph) -> None:
    sent = _rows_sent(graph)[0]
    sent.args = (sent.args[0], sent.args[2], sent.args[1], *sent.args[3:])


def _drop(graph: ParallelGraph, wait: fx.Node) -> None:
    wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(wait)


def _rows_without_a_wait(graph: ParallelGraph) -> None:
    _drop(graph, next(iter(_rows_sent(graph)[0].users)))


def _counts_without_a_wait(graph: ParallelGraph) -> None:
    counts = next(node for node in graph if role_of(node) is Role.EXCHANGE and node.meta["val"].dim() == 1)
    _drop(graph, next(iter(counts.users)))


def _parameters_without_a_wait(graph: ParallelGraph) -> None:
    _drop(graph, next(node for node in graph if role_of(node) is Role.UNSHARD_WAIT))


def _freed_before_its_use(graph: ParallelGraph) -> None:
    product = _products(graph, 0)[0]
    weight = product.args[1].args[0]  # type: ignore[union-attr]
    freed = next(node for node in graph if role_of(node) is Role.RESHARD and weight in node.all_input_nodes)
    product.prepend(freed)


def _an_operator_of_the_cpu(graph: ParallelGraph) -> None:
    product = _products(graph, 0)[0]
    rows = product.args[0]
    assert isinstance(rows, fx.Node)
    with graph.graph.inserting_before(product):
        logit = graph.call(aten.logit.default, rows, like=product, value=rows.meta["val"].clone())
    product.update_arg(0, logit)


def _a_constant_on_the_cpu(graph: ParallelGraph) -> None:
    node = next(node for node in graph if node.kwargs.get("device") == "npu")
    node.kwargs = {**node.kwargs, "device": torch.device("cpu")}


SORTED, SAME = "the rows of the permute whose sorted_indices these are", "rows in another order"
DAMAGED: dict[str, tuple[Damage, str, str, str]] = {
    "order of another layer": (_forward_order_of_another_layer, "rows", SORTED, SAME),
    "received order of another layer": (_received_order_of_another_layer, "rows", SORTED, SAME),
    "order of another layer, backward": (_backward_order_of_another_layer, "rows", SORTED, SAME),
    "order of the exchange for tokens": (_order_of_the_exchange_for_tokens, "rows", SORTED, SAME),
    "ids for an order": (_ids_for_an_order, "rows", "sorted_indices of an npu_moe_token_permute", "%"),
    "probs of another layer": (_probs_of_another_layer, "rows", "the probs and rows of an", "which none of them has"),
    "no probs in backward": (_no_probs_in_backward, "rows", "the probs and rows of an", "no probs"),
    "no probs in backward, types": (_no_probs_in_backward, "kernel-types", "recorded: FakeTensor", "computed: None"),
    "topK": (_another_number_of_choices, "target", "one index for each token and choice", "numel() = 2*"),
    "no num_tokens": (_no_number_of_tokens, "kernel-types", "recorded: bfloat16[", "computed: bfloat16[2*"),
    "ids of another layer": (_ids_of_another_layer, "rows", "rows in the order whose counts the context has", SAME),
    "seven experts": (_another_number_of_experts, "kernel-types", "recorded: int64[8]", "computed: int64[7]"),
    "rows as they arrived": (_rows_as_they_arrived, "rows", "rows in the order of the experts whose counts", SAME),
    "left and right": (_sides_of_an_outer_product, "kernel-types", "recorded: bfloat16[4, 64, 96]", "[4, 96, 64]"),
    "splits exchanged": (_splits_exchanged, "rows", "rows in the order in which they arrived", SAME),
    "no wait for rows": (_rows_without_a_wait, "wait", "one _c10d_functional::wait_tensor", "no wait"),
    "no wait for counts": (_counts_without_a_wait, "wait", "one _c10d_functional::wait_tensor", "no wait"),
    "no wait for parameters": (_parameters_without_a_wait, "wait", "one ep_fx::unshard_wait", "no wait"),
    "freed before its use": (_freed_before_its_use, "live", "after %reshard", "reads it"),
    "an operator of the CPU": (_an_operator_of_the_cpu, "on-device", "kernels of the NPU inside of", "no kernel of it"),
    "a constant on the CPU": (_a_constant_on_the_cpu, "on-device", 'device="npu"', "the CPU"),
}


def _copy() -> ParallelGraph:
    graph = hf_for_npu("mixtral", torch.bfloat16, fsdp=2, ep=2).lowered.copy()
    for node in graph:
        node.meta = copy.copy(node.meta)
    return graph


@pytest.mark.timeout(180)  # the first captures the model
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str) -> None:
    graph = _copy()
    damage, rule, expected, got = DAMAGED[name]
    damage(graph)
    report = check_target(graph)
    found = [(violation.expected, violation.got) for violation in report.of(rule).violations]
    assert any(expected in wanted and got in there for wanted, there in found), report.explain()
    with pytest.raises(VerificationError, match="remedy"):
        report.raise_if_broken()


def test_every_rule_looks_at_something() -> None:
    report = check_target(_copy())
    assert report.ok, report.explain()
    checked = {result.rule.id: result.checked for result in report.results}
    assert set(checked) == {"target", "kernel-types", "rows", "on-device", *KEPT}
    assert all(checked.values()), checked
    assert checked["rows"] >= 40
