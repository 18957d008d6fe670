"""Parameters of one unit, from shards to whole and back: gather, free, and the forms of uneven cuts.

    [pad_shard] unshard unshard_wait getitem [assemble] ... reshard

For equal cuts along dim 0 what unshard_wait gives IS the parameter: nothing is packed or copied. `reshard` frees the
memory of every view of its arguments; it mutates, so no clean-up drops it. Called without autograd. Calls operators of
the private namespace ``_c10d_functional``, which ``torch.distributed._functional_collectives`` defines.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from ep_fx.ops.library import register

_LARGE = 1 << 19
"""Bytes of a shard from which packing costs more than one more message does."""


def _pad_shard(shard: Tensor, dim: int, size: int) -> Tensor:
    if shard.shape[dim] == size:
        return shard
    padded = shard.new_zeros(_resized(shard, dim, size))
    padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    return padded


def _pad_shard_fake(shard: Tensor, dim: int, size: int) -> Tensor:
    return shard if shard.shape[dim] == size else shard.new_empty(_resized(shard, dim, size))


def _resized(tensor: Tensor, dim: int, size: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] = size
    return shape


def coalesced(collective: Callable[..., list[Tensor]], tensors: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    """`collective` of `tensors`, one call for each dtype: gloo refuses a mixture or, in a gather, scrambles it."""
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [index for index, tensor in enumerate(tensors) if tensor.dtype is dtype]
        operands = [tensors[index].contiguous() for index in alike]
        results.update(zip(alike, collective(operands, *arguments), strict=True))
    return [results[index] for index in range(len(tensors))]


def _unshard(shards: Sequence[Tensor], world_size: int, group: str) -> list[Tensor]:
    """All together, but large shards on the CPU in a call each: gloo packs and unpacks what it gathers together."""
    collectives = torch.ops._c10d_functional
    results: dict[int, Tensor] = {
        index: collectives.all_gather_into_tensor(shard.contiguous(), world_size, group)
        for index, shard in enumerate(shards)
        if shard.device.type == "cpu" and shard.nbytes >= _LARGE
    }
    rest = [index for index in range(len(shards)) if index not in results]
    together = [shards[index] for index in rest]
    gathered = coalesced(collectives.all_gather_into_tensor_coalesced, together, world_size, group)
    results.update(zip(rest, gathered, strict=True))
    return [results[index] for index in range(len(shards))]


def _unshard_fake(shards: Sequence[Tensor], world_size: int, group: str) -> list[Tensor]:
    return [shard.new_empty([world_size * shard.shape[0], *shard.shape[1:]]) for shard in shards]


def wait_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Waits for every one of `tensors` and returns them."""
    return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in tensors]


def same_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fake kernel of a wait."""
    return list(tensors)


def _blocks(stacked: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """The part of each rank's padded block that holds data, as views."""
    blocks = stacked.view(len(sizes), stacked.shape[0] // len(sizes), *stacked.shape[1:])
    return [block.narrow(dim, 0, size) for block, size in zip(blocks.unbind(0), sizes, strict=True)]


def _assemble(gathered: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return torch.cat(_blocks(gathered, dim, sizes), dim)


def _assemble_fake(gathered: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    shape = [gathered.shape[0] // len(sizes), *gathered.shape[1:]]
    shape[dim] = sum(sizes)
    return gathered.new_empty(shape)


def _disassemble(grad: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    parts = torch.split(grad, list(sizes), dim)
    if min(sizes) == max(sizes):
        return torch.cat(parts)
    stacked = grad.new_zeros(_stacked_shape(grad, dim, sizes))
    for block, part in zip(_blocks(stacked, dim, sizes), parts, strict=True):
        block.copy_(part)
    return stacked


def _disassemble_fake(grad: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return grad.new_empty(_stacked_shape(grad, dim, sizes))


def _stacked_shape(grad: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    shape = _resized(grad, dim, max(sizes))
    shape[0] *= len(sizes)
    return shape


def _reshard(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)


def _reshard_fake(parameters: Sequence[Tensor]) -> None:
    return None


register("pad_shard(Tensor(a) shard, int dim, int size) -> Tensor(a)", _pad_shard, _pad_shard_fake)
register("unshard(Tensor[] shards, int world_size, str group) -> Tensor[]", _unshard, _unshard_fake)
register("unshard_wait(Tensor(a)[] gathered) -> Tensor(a)[]", wait_all, same_all)
register("assemble(Tensor gathered, int dim, int[] sizes) -> Tensor", _assemble, _assemble_fake)
register("reshard(Tensor(a!)[] parameters) -> ()", _reshard, _reshard_fake)
register("disassemble(Tensor grad, int dim, int[] sizes) -> Tensor", _disassemble, _disassemble_fake)
