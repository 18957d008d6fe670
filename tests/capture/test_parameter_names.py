"""A parameter may be called anything that Python allows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.capture import placeholder_names
from ep_fx.testing import RankPools, local_mesh


class Capitals(nn.Module):
    """Names in capital letters, which torch.fx writes small."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.wQ = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
        self.E = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.E(x * self.A_log) * self.wQ)


def _run(rank: int) -> str:
    torch.manual_seed(0)
    return str(ep_fx.check(Capitals(), local_mesh(fsdp=2, ep=2), torch.randn(3, 4), transform_options={"plan": {}}))


def test_capital_letters_in_names_are_kept_apart_from_the_names_of_nodes(ranks: RankPools) -> None:
    for report in ranks(4).run(_run):
        assert "5 compared, 0 beyond" in report, report


class Alike(nn.Module):
    """Paths that differ only where the dots are, for parameters, buffers and inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_b = nn.Module(), nn.Module()
        for number, (owner, leaf) in enumerate([(self.a, "b_c"), (self.a_b, "c")], start=1):
            owner.register_parameter(leaf, nn.Parameter(torch.full((4,), float(number))))
            owner.register_buffer(f"{leaf}_n", torch.full((4,), 10.0 * number))

    def forward(self, x: dict[str, Tensor], x_y: Tensor) -> Tensor:
        scaled = x["y"] * self.a.b_c + self.a.b_c_n
        return torch.tanh(0.01 * (scaled + x_y * self.a_b.c * self.a_b.c_n))


def _run_alike(rank: int) -> str:
    torch.manual_seed(rank)
    inputs = ({"y": torch.randn(3, 4)}, torch.randn(3, 4))
    return str(ep_fx.check(Alike(), local_mesh(fsdp=2, ep=2), *inputs, transform_options={"plan": {}}))


def test_names_that_differ_only_in_their_dots_are_two_parameters(ranks: RankPools) -> None:
    for report in ranks(4).run(_run_alike):
        assert "3 compared, 0 beyond" in report, report  # the output and two gradients


def test_placeholders_are_never_shared() -> None:
    names = placeholder_names("param", ["a.b_c", "a_b.c", "a.b.c", "a_b_c__2"])
    assert names == ["param_a_b_c", "param_a_b_c__2", "param_a_b_c__3", "param_a_b_c__2__2"]
