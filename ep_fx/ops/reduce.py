"""Gradients of one unit: summed over the ranks on which they differ, divided once, cut to the parameter's shard.

    [disassemble] reduce_grad reduce_grad_wait [all_reduce_grad reduce_grad_wait] scale_grad getitem [unpad_shard]

Sums and the division are apart because a sum works on every backend, and because the divisor is not the size of the
group. No argument is written. Calls operators of the private namespace ``_c10d_functional``.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_fx.ops.library import register
from ep_fx.ops.unshard import coalesced, same_all, wait_all


def _reduce_grad(grads: Sequence[Tensor], world_size: int, group: str) -> list[Tensor]:
    return coalesced(torch.ops._c10d_functional.reduce_scatter_tensor_coalesced, grads, "sum", world_size, group)


def _reduce_grad_fake(grads: Sequence[Tensor], world_size: int, group: str) -> list[Tensor]:
    return [grad.new_empty([grad.shape[0] // world_size, *grad.shape[1:]]) for grad in grads]


def _all_reduce_grad(grads: Sequence[Tensor], group: str) -> list[Tensor]:
    return coalesced(torch.ops._c10d_functional.all_reduce_coalesced, grads, "sum", group)


def _all_reduce_grad_fake(grads: Sequence[Tensor], group: str) -> list[Tensor]:
    return [grad.new_empty(grad.shape) for grad in grads]


def _scale_grad(grads: Sequence[Tensor], divisor: float) -> list[Tensor]:
    return list(torch._foreach_div([grad.contiguous() for grad in grads], divisor))


def _scale_grad_fake(grads: Sequence[Tensor], divisor: float) -> list[Tensor]:
    return [grad.new_empty(grad.shape) for grad in grads]


def _unpad_shard(shard: Tensor, dim: int, like: Tensor) -> Tensor:
    """The first ``like.shape[dim]`` entries along `dim`: sizes differ by rank, so none is a literal of the graph."""
    return shard.narrow(dim, 0, like.shape[dim]).contiguous()


register("reduce_grad(Tensor[] grads, int world_size, str group) -> Tensor[]", _reduce_grad, _reduce_grad_fake)
register("all_reduce_grad(Tensor[] grads, str group) -> Tensor[]", _all_reduce_grad, _all_reduce_grad_fake)
register("reduce_grad_wait(Tensor(a)[] grads) -> Tensor(a)[]", wait_all, same_all)
register("scale_grad(Tensor[] grads, float divisor) -> Tensor[]", _scale_grad, _scale_grad_fake)
register("unpad_shard(Tensor(a) shard, int dim, Tensor like) -> Tensor(a)", _unpad_shard, _unpad_shard)
