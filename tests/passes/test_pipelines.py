"""The passes that a pipeline may name, from here and from outside, and `transform(pipeline=...)`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

import ep_fx
from ep_fx.graph import ContractError, ParallelGraph, Pass, parse_pipeline, print_pipeline
from ep_fx.passes import GROUP, DeadCode, ExpertParallel, Fsdp, _outside, default_pipeline, known_passes, pipeline_of
from ep_fx.testing import fake_mesh
from tests.models.hand_moe import HandMoE, tokens_for

DEFAULT = "dead-code,expert-parallel,fsdp,dead-code"


@dataclass(frozen=True)
class Counting(Pass):
    """A pass of somebody else's."""

    name: ClassVar[str] = "count-nodes"
    requires: ClassVar[frozenset[str]] = frozenset({"fsdp"})
    counts: ClassVar[list[int]] = []
    factor: int = 1

    def apply(self, graph: ParallelGraph) -> None:
        self.counts.append(self.factor * len(graph.graph.nodes))


class NoPass:
    """Something else."""


def contributed(*points: tuple[str, str]) -> Any:
    """While open, installed packages contribute these entry points: (name, attribute of this module)."""
    found = EntryPoints(EntryPoint(name, f"{__name__}:{attribute}", GROUP) for name, attribute in points)
    return mock.patch.object(_outside, "entry_points", lambda group: found.select(group=group))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(fsdp=2, ep=2) as found:
        yield found


def transformed(mesh: DeviceMesh, **options: Any) -> ep_fx.EPModule:
    return ep_fx.transform(HandMoE(), mesh, example_inputs=(tokens_for([0, 1, 2, 3]),), **options)


def test_the_default_pipeline_prints_and_parses_back() -> None:
    assert print_pipeline(default_pipeline()) == DEFAULT
    assert pipeline_of(DEFAULT) == default_pipeline()
    assert pipeline_of([Fsdp(), DeadCode()]) == (Fsdp(), DeadCode())


def test_every_known_pass_prints_and_parses_back_and_says_what_it_is() -> None:
    for name, cls in known_passes().items():
        assert cls.name == name
        assert parse_pipeline(name, known_passes()) == (cls(),)
        assert cls.__doc__


def test_an_unknown_pass_lists_the_known_ones_those_from_outside_too() -> None:
    with contributed(("count-nodes", "Counting")), pytest.raises(ValueError, match="no pass 'prefetch'; ") as raised:
        pipeline_of("fsdp,prefetch{depth=1}")
    assert "known passes: count-nodes, dead-code, expert-parallel, fsdp" in str(raised.value)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([("count-nodes", "NoPass")], "expected a subclass of ep_fx.graph.Pass"),
        ([("other-name", "Counting")], "the pass calls itself 'count-nodes'"),
        ([("count-nodes", "Counting"), ("count-nodes", "Counting")], "another pass of this name"),
        ([("fsdp", "Fsdp")], "another pass of this name"),
    ],
)
def test_a_contribution_that_cannot_be_used_is_refused_by_name(points: list[tuple[str, str]], message: str) -> None:
    with contributed(*points), pytest.raises(ValueError, match=message) as raised:
        known_passes()
    assert f"entry point '{points[0][0]}' = '{__name__}:" in str(raised.value)


def test_a_pass_from_outside_runs_and_its_record_is_kept(mesh: DeviceMesh) -> None:
    with contributed(("count-nodes", "Counting")):
        module = transformed(mesh, pipeline=f"{DEFAULT},count-nodes{{factor=2}}")
    assert [r.name for r in module.programs[0].records] == [*DEFAULT.split(","), "count-nodes"]
    assert Counting.counts == [2 * len(module.graph.graph.nodes)]
    assert module.graph.provides[-1] == "count-nodes"
    rows = [line.split()[0] for line in module.explain_passes().splitlines()]
    assert rows == ["pass", *DEFAULT.split(","), "count-nodes"]


def test_options_of_the_pipeline_fix_the_policies_of_the_manifest(mesh: DeviceMesh) -> None:
    pipeline = DEFAULT.replace("fsdp", "fsdp{reshard=early,after_forward=false}")
    by_text = transformed(mesh, pipeline=pipeline)
    by_option = transformed(mesh, expert_reshard="early", reshard_after_forward=False)
    assert by_text.graph.manifest == by_option.graph.manifest
    assert by_text.print_graph() == by_option.print_graph() != transformed(mesh).print_graph()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pipeline": "fsdp{reshard=late}"}, ValueError, "expected strict, early or none, got 'late'"),
        ({"pipeline": "fsdp{prefetch=2}"}, ValueError, "no option 'prefetch'; its options: reshard: strict, early"),
        ({"pipeline": 3}, TypeError, "pipeline must be a text such as"),
        ({"pipeline": [Fsdp]}, TypeError, "or a sequence of passes"),
        ({"pipeline": "fsdp,dead-code"}, ValueError, "lacks 'expert-parallel', which lowers the token exchange"),
        ({"pipeline": [ExpertParallel()]}, ValueError, "lacks 'fsdp', which shards the parameters"),
        ({"pipeline": "expert-parallel,fsdp,fsdp"}, ContractError, "'fsdp' provides .*holds already"),
        ({"pipeline": [ExpertParallel(), Counting(), Fsdp()]}, ContractError, r"'count-nodes' requires \['fsdp'\]"),
        (
            {"pipeline": "expert-parallel,fsdp{reshard=strict}", "expert_reshard": "early"},
            ValueError,
            "asks for expert_reshard 'strict', but 'early' was given",
        ),
    ],
    ids=str,
)
def test_a_pipeline_that_cannot_work_is_refused_before_any_group_is_made(
    mesh: DeviceMesh, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with mock.patch("ep_fx.api.mesh_spec") as made, pytest.raises(error, match=message):
        ep_fx.transform(HandMoE(), mesh, **options)
    made.assert_not_called()
