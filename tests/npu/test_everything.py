"""A call with a padding mask, labels that leave out what it leaves out, and the auxiliary loss, on the npu device."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_map_only

import ep_fx
from ep_fx.testing.ranks import RankPool, local_mesh
from tests.hf.cases import CASES, SHAPES, Meaning
from tests.hf.measure import averaged_gradients, full
from tests.models.hf import tiny_hf
from tests.oracle import relative_error

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _moved(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    moved: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), dict(values))
    return moved


def _errors(rank: int, arch: str) -> dict[str, float]:
    """Of each field of the output where there is a token, and of each gradient, for two shapes."""
    whole, module = tiny_hf(arch), ep_fx.transform(tiny_hf(arch), local_mesh(fsdp=2, ep=2))
    errors = {}
    for batch, length in SHAPES:
        kwargs = CASES["everything"](rank, batch, length)
        got, want = module(**_moved(kwargs, "npu")), whole(**kwargs)
        got.loss.backward()
        want.loss.backward()
        meaning = Meaning.of(kwargs)
        fields, expected = meaning.fields(_moved(got, "cpu")), meaning.fields(want)
        gradients = averaged_gradients(whole)
        errors.update({f"{batch} {name}": relative_error(fields[name], value) for name, value in expected.items()})
        for name, parameter in module.named_parameters():
            errors[f"{batch} {name}"] = relative_error(full(parameter.grad).cpu(), gradients[name])
        for model in (module, whole):
            model.zero_grad()
    return errors


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_fields_and_gradients(npu_ranks: RankPool, arch: str) -> None:
    for errors in npu_ranks.run(_errors, arch, timeout=280):
        assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}
