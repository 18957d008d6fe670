"""A weight that is used through a cast is gathered in backward for the cast alone, and freed before its readers run."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.graph import Role, is_backward, role_of
from ep_fx.testing.fake import fake_mesh
from ep_fx.testing.ranks import RankPools, local_mesh
from tests.models.architectures import build, inputs_of
from tests.models.families import row
from tests.models.hand_moe import HandMoE
from tests.oracle import relative_error


class Normed(nn.Module):
    """A scale in a wider dtype, behind a linear layer: backward reads the cast last of all that the unit has.

    Args:
        viewed: forward reads the cast again through a view, and backward both, at different places.
    """

    def __init__(self, viewed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.moe = HandMoE(grouped=True)
        self.viewed = viewed

    def forward(self, x: Tensor) -> Tensor:
        """x [N, 8] -> [N, 8]"""
        wide = self.scale.to(torch.float64)
        y = wide * self.first(x).to(torch.float64)
        if self.viewed:
            y = wide.view(1, -1) * y.tanh()
        return x + self.moe(y.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("viewed", [False, True], ids=["once", "viewed"])
def test_backward_makes_the_cast_and_frees_the_weight_before_it_computes(dtype: torch.dtype, viewed: bool) -> None:
    with fake_mesh(fsdp=2, ep=2) as mesh:
        module = ep_fx.transform(Normed(viewed).to(dtype), mesh, example_inputs=(torch.zeros(6, 8, dtype=dtype),))
        graph = module.graph
    backward = [node for node in graph if is_backward(node)]
    copies = [n for n in backward if n.target is torch.ops.aten._to_copy.default]
    casts = [n for n in copies if "scale" in n.all_input_nodes[0].name]
    assert len(casts) == 1
    after = next(n for n in backward[backward.index(casts[0]) :] if role_of(n) is Role.RESHARD)
    assert casts[0].all_input_nodes[0] in after.all_input_nodes
    between = backward[backward.index(casts[0]) + 1 : backward.index(after)]
    assert between == []


def test_the_pattern_of_cohere2_moe_a_norm_in_fp32_after_a_tied_embedding() -> None:
    architecture = row("cohere2_moe")
    with fake_mesh(fsdp=2, ep=2) as mesh:
        module = ep_fx.transform(
            build(architecture).to(torch.bfloat16), mesh, example_kwargs=inputs_of(architecture, 0), dynamic=False
        )
        assert module.verify().ok


def errors(rank: int, keep: bool) -> dict[str, float]:
    """Relative error of each gradient outside of the experts."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    whole = Normed(viewed=True)
    torch.manual_seed(0)
    module = ep_fx.transform(Normed(viewed=True), local_mesh(fsdp=2, ep=2), reshard_after_forward=not keep)
    module(x).square().mean().backward()
    whole(x).square().mean().backward()
    found = {}
    for name in ("first.weight", "scale"):
        want = whole.get_parameter(name).grad
        assert want is not None
        torch.distributed.all_reduce(want)
        got = module.get_parameter(name).grad
        found[name] = relative_error(got.full_tensor(), want / 4)  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
def test_gradients_through_casts_are_those_of_one_process(ranks: RankPools, keep: bool) -> None:
    for found in ranks(4).run(errors, keep):
        assert all(error <= 1e-5 for error in found.values()), found
