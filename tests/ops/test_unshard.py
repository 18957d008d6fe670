"""unshard and its kin: gathered values and memory, uneven cuts there and back, freeing of storage."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

import ep_fx.ops  # noqa: F401  defines the operators

ops = torch.ops.ep_fx
CUTS = [
    pytest.param(0, (3, 3), id="rows-even"),
    pytest.param(0, (3, 3, 1), id="rows-uneven"),
    pytest.param(0, (2, 2, 0, 0), id="rows-with-empty-shards"),
    pytest.param(1, (2, 2, 2), id="columns-even"),
    pytest.param(1, (3, 3, 1), id="columns-uneven"),
    pytest.param(1, (4, 0), id="columns-with-empty-shard"),
]


def _full(dim: int, sizes: tuple[int, ...]) -> Tensor:
    return torch.randn((sum(sizes), 4) if dim == 0 else (5, sum(sizes)))


def _stacked(full: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """What a gather of the padded shards gives."""
    return torch.cat([ops.pad_shard(shard, dim, max(sizes)) for shard in full.split(sizes, dim)])


@pytest.mark.parametrize(("dim", "sizes"), CUTS)
def test_assemble_undoes_cutting_and_padding(dim: int, sizes: tuple[int, ...], poisoned_memory: None) -> None:
    full = _full(dim, sizes)
    assembled = ops.assemble(_stacked(full, dim, sizes), dim, sizes)
    assert torch.equal(assembled, full)
    assert assembled.is_contiguous()


@pytest.mark.parametrize(("dim", "sizes"), CUTS)
def test_disassemble_gives_padded_blocks(dim: int, sizes: tuple[int, ...], poisoned_memory: None) -> None:
    full = _full(dim, sizes)
    stacked = ops.disassemble(full, dim, sizes)
    assert torch.equal(stacked, _stacked(full, dim, sizes))
    assert torch.equal(ops.assemble(stacked, dim, sizes), full)
    for block, shard in zip(stacked.chunk(len(sizes)), full.split(sizes, dim), strict=True):
        assert torch.equal(ops.unpad_shard(block, dim, shard), shard)


def test_disassemble_takes_gradients_in_any_layout() -> None:
    full = torch.randn(4, 7).t()
    assert torch.equal(ops.assemble(ops.disassemble(full, 0, (3, 3, 1)), 0, (3, 3, 1)), full)
    assert ops.disassemble(torch.ones(1, 1).expand(7, 4), 0, (3, 3, 1)).is_contiguous()


def test_one_dimensional_parameters() -> None:
    full = torch.randn(7)
    assert torch.equal(ops.assemble(ops.disassemble(full, 0, (3, 3, 1)), 0, (3, 3, 1)), full)


def test_pad_shard_of_full_size_is_its_argument() -> None:
    shard = torch.randn(3, 2)
    assert ops.pad_shard(shard, 0, 3).untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()


def test_unshard_gathers_each_parameter_into_memory_of_its_own(local_group: str) -> None:
    shards = [torch.randn(3, 2), torch.randn(4).bfloat16(), torch.randn(2, 3).t()]
    gathered = ops.unshard(shards, 1, local_group)
    full = ops.unshard_wait(gathered)
    for shard, start, done in zip(shards, gathered, full, strict=True):
        assert torch.equal(done, shard)
        assert done.untyped_storage().data_ptr() == start.untyped_storage().data_ptr()
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*shards, *full)}) == 6


def test_reshard_frees_the_memory_of_every_view() -> None:
    full, kept = torch.randn(4, 4), torch.randn(4)
    view = full.t()
    ops.reshard([full])
    assert full.untyped_storage().size() == view.untyped_storage().size() == 0
    assert full.shape == (4, 4)
    assert kept.untyped_storage().size() == 16


def test_reshard_survives_dead_code_elimination() -> None:
    graph = fx.Graph()
    parameter = graph.placeholder("parameter")
    graph.call_function(ops.reshard.default, ([parameter],))
    graph.call_function(ops.assemble.default, (parameter, 0, [1]))
    graph.output(())
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [ops.reshard.default]
