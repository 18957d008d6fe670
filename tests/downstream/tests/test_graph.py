"""What the graph of this project's model looks like, for any number of ranks; no process but this one."""
from __future__ import annotations

import pytest
from my_project.model import Model, tokens

import ep_fx
from ep_fx.testing import (
    Golden,
    SelectorError,
    assert_before,
    assert_collectives,
    assert_count,
    assert_flows,
    assert_live_range,
    assert_reduced_once,
)
from ep_fx.testing.fake import FakeMeshes
from ep_fx.testing.select import dispatch, dispatch_backward, grouped_mm, layer, phase, reshard, role, unshard

LAYERS = ("layers.0", "layers.1")


@pytest.mark.parametrize("name", LAYERS)
def test_experts_are_gathered_before_dispatch_and_freed_after_combine(module: ep_fx.EPModule, name: str) -> None:
    experts = f"{name}.experts"
    assert_before(module, unshard(experts), dispatch(name))
    assert_before(module, f"combine[layer={name}]", reshard(experts) & phase("forward"))
    assert_live_range(module, experts, covers=(grouped_mm(name), role("grouped_mm_backward", layer=name)))


def test_the_context_flows_from_dispatch_to_combine_and_to_backward(module: ep_fx.EPModule) -> None:
    assert_flows(module, "dispatch", "combine")
    assert_flows(module, "dispatch", "combine_backward", dispatch_backward())


def test_what_a_step_communicates(module: ep_fx.EPModule) -> None:
    assert_count(module, layer("layers.0") & role("all_to_all"), 5)
    assert_collectives(module, {
        "unshard * over fsdp,ep": 6, "unshard *.experts over fsdp": 4,
        "dispatch_counts * over ep": 2, "dispatch * over ep": 2, "combine * over ep": 2,
        "combine_backward * over ep": 2, "dispatch_backward * over ep": 2, "reduce_grad * over fsdp*": 5,
    })


def test_every_gradient_is_reduced_once(module: ep_fx.EPModule) -> None:
    assert_reduced_once(module)
    assert_reduced_once(module, "layers.*.experts.*", over=("fsdp",), divisor=4)


def test_golden_files(module: ep_fx.EPModule, graph_golden: Golden) -> None:
    graph_golden(module, "exchanges", "dispatch[layer=layers.1] | combine[layer=layers.1]")
    graph_golden(module, "order")


def test_a_thousand_ranks(ep_fake_mesh: FakeMeshes) -> None:
    mesh = ep_fake_mesh(replicate=8, fsdp=32, ep=4)
    graph = ep_fx.transform(Model(layers=1), mesh, example_inputs=(tokens(),)).graph
    assert_reduced_once(graph, "layers.0.experts.*", over=("replicate", "fsdp"), divisor=1024)


def test_a_typing_error_is_told(module: ep_fx.EPModule) -> None:
    with pytest.raises(SelectorError, match=r"did you mean 'layers.1.experts'\?"):
        assert_count(module, "unshard[unit=layer.1.experts]", 2)
