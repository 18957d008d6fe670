"""What one writes without ep_fx: FSDP2's `fully_shard` with expert parallelism inside the experts' forward.

The exchange is a pair of autograd functions around ``dist.all_to_all_single``; experts are split over ``ep`` as
DTensors and sharded over ``fsdp``, each layer and the rest over all ranks, as torch's users do it today. Sorting,
regrouping and products are the operators of ``torch.ops.ep_fx``, the ones that the transformed model runs (`grouped_mm`
calls torch's native kernel): so the two differ in how the step is put together, and in no kernel.
"""
from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ep_fx  # noqa: F401  (defines the operators)
from benchmarks.models import mixtral
from ep_fx.ops import DispatchContext, dispatch_context

_NAME = "eager_ep"


class _Dispatch(torch.autograd.Function):
    """Rows to their experts' rank, in the order of its local experts; in backward their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: DispatchContext, group: Any) -> Tensor:
        ctx.rest = (context, group)
        return _send(rows, context, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _send_back(grads[0], *ctx.rest), None, None


class _Combine(torch.autograd.Function):
    """The reverse of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: DispatchContext, group: Any) -> Tensor:
        ctx.rest = (context, group)
        return _send_back(rows, context, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _send(grads[0], *ctx.rest), None, None


def _send(rows: Tensor, context: DispatchContext, group: Any) -> Tensor:
    arrived = rows.new_empty((sum(context.output_splits), rows.shape[1]))
    splits = list(context.output_splits), list(context.input_splits)
    dist.all_to_all_single(arrived, rows.contiguous(), *splits, group=group)
    return cast(Tensor, torch.ops.ep_fx.regroup(arrived, context.permuted_indices))


def _send_back(rows: Tensor, context: DispatchContext, group: Any) -> Tensor:
    back = rows.new_empty((sum(context.input_splits), rows.shape[1]))
    splits = list(context.input_splits), list(context.output_splits)
    dist.all_to_all_single(back, torch.ops.ep_fx.ungroup(rows, context.permuted_indices), *splits, group=group)
    return back


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _experts_forward(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, D], ids and weights [T, K] -> [T, D]."""
    ops, group = torch.ops.ep_fx, module.ep_group
    rows, counts, order = ops.permute(hidden, ids, module.num_experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    context = dispatch_context(counts, received, rows.shape[0], module.ep_size, "experts")
    routed = _Dispatch.apply(rows, context, group)  # type: ignore[no-untyped-call]
    local_counts = context.tokens_per_expert
    inner = module._apply_gate(ops.grouped_mm(routed, _local(module.gate_up_proj), local_counts, None, True))
    out = ops.grouped_mm(inner, _local(module.down_proj), local_counts, None, True)
    back = _Combine.apply(out, context, group)  # type: ignore[no-untyped-call]
    return cast(Tensor, ops.unpermute(back, order, weights))


def eager_model(mesh: DeviceMesh) -> nn.Module:
    """The benchmark's model on `mesh` (fsdp, ep)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts_forward)
    model = mixtral(_NAME)
    everyone = mesh["fsdp", "ep"]._flatten("benchmark_all")
    for layer in model.model.layers:  # type: ignore[union-attr]
        experts = cast(Any, layer).mlp.experts
        experts.ep_group, experts.ep_size = mesh["ep"].get_group(), mesh["ep"].size()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            split = distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])
            experts.register_parameter(name, nn.Parameter(split))
        fully_shard(experts, mesh=mesh["fsdp"])
        experts.set_gradient_divide_factor(float(mesh.size()))
        experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model
