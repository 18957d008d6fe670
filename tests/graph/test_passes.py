"""The pass manager: contracts, checks after every pass, what each pass did, and who is to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from ep_fx.graph import (
    ContractError,
    Manifest,
    MeshSpec,
    ParallelGraph,
    Pass,
    PassError,
    PassManager,
    check_contracts,
    format_records,
)
from ep_fx.passes import Fsdp

aten = torch.ops.aten


def chain(length: int = 4) -> ParallelGraph:
    """``relu(relu(..x))``"""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(aten.relu.default, (value,))
    graph.output(((value,), (), ()))
    return ParallelGraph(graph, Manifest(MeshSpec({}, {}), (), (), ("x",), (), 1, ()))


def step(
    called: str,
    act: Callable[[ParallelGraph], object] = lambda graph: None,
    requires: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
) -> Pass:
    """A pass that does `act`."""

    @dataclass(frozen=True)
    class Step(Pass):
        name: ClassVar[str] = called

        def apply(self, graph: ParallelGraph) -> None:
            act(graph)

    Step.requires, Step.provides = frozenset(requires), frozenset(provides)
    return Step()


def add_one(graph: ParallelGraph) -> None:
    with graph.graph.inserting_before(graph.output):
        graph.call(aten.neg.default, next(iter(graph)))


def remove_one(graph: ParallelGraph) -> None:
    node = next(n for n in graph if n.target is aten.neg.default)
    graph.graph.erase_node(node)


def move_one(graph: ParallelGraph) -> None:
    negation = next(n for n in graph if n.target is aten.neg.default)
    next(iter(graph)).append(negation)


def test_a_pass_must_find_what_it_requires_and_may_stand_in_for_another() -> None:
    needy, other = step("needy", requires=("cuts",)), step("other", provides=("cuts",))
    assert check_contracts([other, needy]) == {"other", "cuts", "needy"}
    with pytest.raises(ContractError, match=r"'needy' requires \['cuts'\]; passes before it: plain"):
        check_contracts([step("plain"), needy])
    assert PassManager([needy]).run(_holding("cuts")).provides == ("cuts", "needy")


def test_what_holds_is_not_provided_a_second_time() -> None:
    other = step("other", provides=("cuts",))
    with pytest.raises(ContractError, match=r"'other' provides \['cuts'\], which holds already; .*: other"):
        check_contracts([other, other])
    with pytest.raises(ContractError, match="passes before it: none"):
        PassManager([other]).run(_holding("cuts"))


def _holding(*facts: str) -> ParallelGraph:
    graph = chain()
    graph.provides = facts
    return graph


def test_contracts_are_checked_before_any_pass_runs() -> None:
    ran: list[str] = []
    passes = [step("first", lambda graph: ran.append("first")), step("second", requires=("third",))]
    with pytest.raises(ContractError, match="'second' requires"):
        PassManager(passes).run(chain())
    assert ran == []


def test_a_policy_other_than_the_graphs_is_refused() -> None:
    graph = chain()
    with pytest.raises(ContractError, match=r"'fsdp\{reshard=early\}' asks for expert_reshard 'early'.* with 'strict'"):
        PassManager([Fsdp(reshard="early")]).run(graph)
    graph.manifest = replace(graph.manifest, expert_reshard="early")
    assert PassManager([Fsdp(reshard="early")]).run(graph).provides == ("fsdp",)


def test_a_failure_names_the_pass_and_those_before_it() -> None:
    def fail(graph: ParallelGraph) -> None:
        raise RuntimeError("no such node")

    with pytest.raises(PassError, match=r"'third' failed \(passes before it: first, second\):\nno such node") as raised:
        PassManager([step("first"), step("second"), step("third", fail)]).run(chain())
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_the_check_runs_after_every_pass_and_what_it_raises_is_the_pass_fault() -> None:
    seen: list[int] = []

    def check(graph: ParallelGraph) -> None:
        seen.append(len(graph.graph.nodes))
        if len(seen) == 2:
            raise ValueError("rule broken")

    manager = PassManager([step("first", add_one), step("second", add_one), step("third")], check)
    with pytest.raises(PassError, match=r"'second' failed .*\nrule broken"):
        manager.run(chain())
    assert seen == [7, 8]
    assert [r.name for r in manager.records] == ["first"]


def test_a_record_counts_nodes_added_removed_and_moved() -> None:
    manager = PassManager([step("add", add_one), step("move", move_one), step("remove", remove_one), step("rest")])
    manager.run(chain())
    assert [(r.nodes_before, r.nodes_after, r.added, r.removed, r.moved) for r in manager.records] == [
        (6, 7, 1, 0, 0),
        (7, 7, 0, 0, 1),
        (7, 6, 0, 1, 0),
        (6, 6, 0, 0, 0),
    ]
    table = format_records(manager.records).splitlines()
    assert table[0].split() == ["pass", "ms", "check", "ms", "nodes", "added", "removed", "moved"]
    assert table[2].split()[0] == "move"
    assert table[2].split()[-4:] == ["7", "0", "0", "1"]


def test_copies_from_before_and_after_are_kept_on_request_only() -> None:
    plain, keeping = PassManager([step("add", add_one)]), PassManager([step("add", add_one)], keep=True)
    graphs: list[Any] = [plain.run(chain()), keeping.run(chain())]
    assert plain.records[0].before is None
    assert plain.records[0].after is None
    before, after = keeping.records[0].before, keeping.records[0].after
    assert before is not None
    assert after is not None
    assert (len(before.graph.nodes), len(after.graph.nodes)) == (6, 7)
    assert after.graph is not graphs[1].graph
    assert (before.provides, after.provides) == ((), ("add",))
