"""Layouts: cuts are DTensor's own, uneven ones too, and a transform leaves DTensor's view of them right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import ep_fx
from ep_fx.sharding import as_dtensor, cut_over_tp, local_shard, make_layout, whole_over_tp
from ep_fx.testing.ranks import RankPools, local_mesh


class Uneven(nn.Module):
    """Parameters whose rows do not divide by 4: 10 rows are cut 3 + 2 + 3 + 2, 3 rows 1 + 1 + 1 + 0, a scalar not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 11.0))
        self.z = nn.Parameter(torch.ones(3, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w + self.z.sum()) * self.scale


def _uneven(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = ep_fx.transform(Uneven(), local_mesh(fsdp=2, ep=2), plan={})
    x = torch.full((3, 10), rank + 1.0)
    module(x).sum().backward()
    values = {name: p.full_tensor().detach() for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    return values, {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]


def test_full_tensors_of_uneven_parameters_and_gradients(ranks: RankPools) -> None:
    """While a flattened mesh is registered, DTensor takes 3 + 2 + 3 + 2 for 3 + 3 + 3 + 1 in full_tensor."""
    w = torch.arange(1.0, 11.0)
    x_mean = 2.5
    want = {
        "w": torch.full((10,), 3 * x_mean * 2.0),
        "z": torch.full((3, 2), 3 * 10 * 2.0),
        "scale": (3 * x_mean * w + 3 * 6.0).sum(),
    }
    for values, gradients in ranks(4).run(_uneven):
        torch.testing.assert_close(values["w"], w)
        for name, gradient in want.items():
            torch.testing.assert_close(gradients[name], gradient, msg=name)


def _cuts(rank: int) -> list[tuple[int, bool, bool]]:
    mesh, found = local_mesh(fsdp=2, ep=2), []
    for rows in range(1, 14):
        full = torch.arange(rows * 2.0).view(rows, 2)
        layout = make_layout((rows, 2), False, {"fsdp": 2, "ep": 2})
        mine = as_dtensor(local_shard(full, layout, mesh), layout, mesh)
        theirs = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
        found.append((rows, torch.equal(mine.to_local(), theirs.to_local()), torch.equal(mine.full_tensor(), full)))
    return found


def test_dense_cuts_are_those_of_dtensor(ranks: RankPools) -> None:
    for found in ranks(4).run(_cuts):
        assert [row for row in found if row[1:] != (True, True)] == []


def _experts(rank: int, num_experts: int, fsdp: int, ep: int) -> bool:
    mesh = local_mesh(fsdp=fsdp, ep=ep)
    full = torch.arange(num_experts * 6.0).view(num_experts, 3, 2)
    layout = make_layout(tuple(full.shape), True, {"fsdp": fsdp, "ep": ep})
    return torch.equal(as_dtensor(local_shard(full, layout, mesh), layout, mesh).full_tensor(), full)


@pytest.mark.parametrize(
    ("num_experts", "fsdp", "ep"), [(4, 2, 2), (6, 2, 2), (2, 2, 2), (4, 1, 4), (5, 4, 1), (3, 4, 1)]
)
def test_expert_blocks_come_together_again(ranks: RankPools, num_experts: int, fsdp: int, ep: int) -> None:
    """Even and uneven cuts of the local block on dim 0, and on dim 1 where there are fewer experts than fsdp ranks."""
    assert all(ranks(4).run(_experts, num_experts, fsdp, ep))


def _cut(rank: int, sizes: dict[str, int], shape: tuple[int, ...], dim: int, blocks: int) -> tuple[bool, bool, bool]:
    """Whether the parts come together, the norm is right, and whole over tp and cut again is the same."""
    mesh = local_mesh(**sizes)
    full = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    layout = make_layout(shape, True, sizes, dim, blocks)
    mine = as_dtensor(local_shard(full, layout, mesh), layout, mesh)
    together = torch.equal(mine.full_tensor(), full)
    norm = torch.linalg.vector_norm(mine).full_tensor()  # type: ignore[attr-defined]
    again = cut_over_tp(whole_over_tp(mine, mesh), layout, mesh)
    same = torch.equal(again.to_local(), mine.to_local()) and again.placements == mine.placements
    return together, torch.allclose(norm, full.norm()), same


SHAPES = [
    pytest.param((4, 6, 5), 1, 1, id="w1"), pytest.param((4, 5, 6), 2, 1, id="w2"),
    pytest.param((2, 6, 5), 1, 1, id="w1, few experts"), pytest.param((4, 12, 5), 1, 2, id="packed"),
    pytest.param((2, 5, 12), 2, 2, id="packed, transposed"), pytest.param((4, 12), 1, 2, id="packed bias"),
    pytest.param((2, 6), 1, 1, id="bias, few experts"),
]


@pytest.mark.parametrize(("shape", "dim", "blocks"), SHAPES)
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_parts_along_tp_come_together_again(
    ranks: RankPools, sizes: dict[str, int], shape: tuple[int, ...], dim: int, blocks: int
) -> None:
    assert set(ranks(4).run(_cut, sizes, shape, dim, blocks)) == {(True, True, True)}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("shape", "dim", "blocks"), SHAPES)
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "ep": 2, "tp": 2}, {"fsdp": 3, "ep": 1, "tp": 2}], ids=str)
def test_parts_along_tp_come_together_again_on_more_ranks(
    ranks: RankPools, sizes: dict[str, int], shape: tuple[int, ...], dim: int, blocks: int
) -> None:
    world = sizes["fsdp"] * sizes["ep"] * sizes["tp"]
    assert set(ranks(world).run(_cut, sizes, shape, dim, blocks, timeout=150)) == {(True, True, True)}
