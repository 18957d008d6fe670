"""A model of transformers that counts its own positions is captured with the causal attention that it runs eagerly."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import masking_utils

from ep_fx.capture import READINGS, Inputs, Trace, find_experts, trace_joint
from tests.models.hf import hf_ids, tiny_hf
from tests.oracle import relative_error

PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 2)


class OwnPositions(nn.Module):
    """Gives the model in it positions that depend on the ids: a new sequence begins at each id 5."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_hf("mixtral", use_cache=False)

    def forward(self, input_ids: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        starts = torch.where(input_ids == 5, places, 0).cummax(1).values
        return self.inner(input_ids=input_ids, position_ids=places - starts)


def forward_trace(model: nn.Module, kwargs: dict[str, Any]) -> Trace:
    """The forward of `model`, unsharded."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    experts = find_experts(model, None, {})
    return trace_joint(
        model, shapes, torch.device("cpu"), experts, Inputs.of((), kwargs), READINGS[0], gradients=False
    )


def attentions(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.module.graph.nodes if "scaled_dot_product" in str(node.target)]


def run(trace: Trace, model: nn.Module, *tensors: Tensor) -> Tensor:
    """The first output of the trace."""
    with torch.no_grad():
        return trace.module(*model.parameters(), *model.buffers(), *tensors)[0][0]


@pytest.mark.parametrize(("default", "given"), [(True, {}), (False, {}), (True, {"use_cache": False})])
def test_counted_positions_need_no_mask(default: bool, given: dict[str, bool]) -> None:
    model = tiny_hf("mixtral", use_cache=default)
    trace = forward_trace(model, {"input_ids": hf_ids(0), **given})
    assert len(attentions(trace)) == 2
    for node in attentions(trace):
        assert "attn_mask" not in node.kwargs
        assert node.args[4] is True
    got, want = run(trace, model, hf_ids(1, 3, 5)), model(input_ids=hf_ids(1, 3, 5)).logits
    assert relative_error(got, want) <= 1e-6


@pytest.mark.parametrize("default", [True, False])
def test_nothing_is_left_on_the_config_or_in_transformers(default: bool) -> None:
    model = tiny_hf("mixtral", use_cache=default)
    config, function = model.config.to_dict(), masking_utils.find_packed_sequence_indices
    forward_trace(model, {"input_ids": hf_ids(0)})
    assert model.config.to_dict() == config
    assert masking_utils.find_packed_sequence_indices is function


def test_positions_that_the_user_gives_keep_packed_sequences_apart() -> None:
    model = tiny_hf("mixtral", use_cache=False)
    trace = forward_trace(model, {"input_ids": hf_ids(0), "position_ids": PACKED})
    assert all("attn_mask" in node.kwargs for node in attentions(trace))
    want = model(input_ids=hf_ids(0), position_ids=PACKED).logits
    assert relative_error(run(trace, model, hf_ids(0), PACKED), want) <= 1e-6


def test_positions_that_a_module_computes_from_values_keep_packed_sequences_apart() -> None:
    model, ids = OwnPositions(), hf_ids(0)
    ids[:, 4] = 5
    trace = forward_trace(model, {"input_ids": ids})
    assert all("attn_mask" in node.kwargs for node in attentions(trace))
    assert relative_error(run(trace, model, ids), model(input_ids=ids).logits) <= 1e-6
