"""`transform(..., target=...)`: what is emitted for another device than the mesh's can be looked at, not run."""
from __future__ import annotations

import pytest
import torch

import ep_fx
from ep_fx.graph import ParallelGraph, graph_equal
from ep_fx.testing.fake import fake_mesh
from tests.models.hf import hf_ids, tiny_hf


def _devices(graph: ParallelGraph) -> set[str]:
    """The devices that arguments of the graph's nodes name."""
    kwargs = [str(node.kwargs["device"]) for node in graph if node.kwargs.get("device") is not None]
    return set(kwargs)


def test_a_module_for_another_device_shows_its_graph_and_refuses_to_run() -> None:
    ids = hf_ids(0, 2, 8)
    with fake_mesh(fsdp=2, ep=2) as mesh:
        module = ep_fx.transform(tiny_hf("mixtral"), mesh, example_kwargs={"input_ids": ids}, target="npu")
    assert _devices(module.graph) == {"cpu"}
    assert _devices(module.lowered) == {"npu"}
    with pytest.raises(ValueError, match=r"emitted for 'npu', its mesh is on 'cpu'.*not run"):
        module(input_ids=ids)


def test_on_the_cpu_the_graph_itself_runs() -> None:
    with fake_mesh(fsdp=2, ep=2) as mesh:
        module = ep_fx.transform(tiny_hf("mixtral"), mesh, example_kwargs={"input_ids": hf_ids(0, 2, 8)})
    assert module.lowered is module.graph


def test_nothing_runs_on_a_mesh_of_fake_ranks() -> None:
    with fake_mesh(fsdp=2) as mesh:
        module = ep_fx.transform(torch.nn.Linear(4, 4), mesh, plan={}, example_inputs=(torch.ones(2, 4),))
        with pytest.raises(ValueError, match=r"mesh is fake \(ep_fake_mesh.*nothing can run on it"):
            module(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"mesh is fake"):  # and no better once its ranks are gone
        module(torch.ones(2, 4))


def test_the_verified_graph_is_the_same_for_every_target() -> None:
    """Up to attention, which an npu target keeps whole."""
    graphs = []
    for target in (None, "npu"):
        with fake_mesh(fsdp=2, ep=2) as mesh:
            example = (torch.ones(2, 64),)
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
            module = ep_fx.transform(model, mesh, plan={}, example_inputs=example, target=target)
        graphs.append(module.graph)
    assert graph_equal(*graphs)


def test_an_unknown_target_is_refused() -> None:
    with fake_mesh(fsdp=2) as mesh, pytest.raises(ValueError, match=r"target must be 'cpu', 'cuda', 'npu',.* or None"):
        ep_fx.transform(torch.nn.Linear(2, 2), mesh, plan={}, target="tpu")  # type: ignore[arg-type]
