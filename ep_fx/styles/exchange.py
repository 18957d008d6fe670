"""Dispatch and combine as plain functions: all that combine needs to know is in the context that dispatch returns.

    routed_input, counts, scores, context = dispatch(experts, mesh, x, num_tokens_per_expert, scores)
    y = combine(experts, routed_output, context, mesh)

Neither reads or writes an attribute of the experts, so any number of calls may be under way at once. Each backward is
one exchange in the other direction, from the same context. All ranks must take part in each: `tied` sees to it that a
rank whose experts get no row has the same graph as the others.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.ops import DispatchContext, dispatch_context


def dispatch(
    module: nn.Module, device_mesh: DeviceMesh, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, DispatchContext]:
    """Sends rows to the ranks of their experts along ``ep``; collective, waits for the device once.

    Args:
        module: the experts, for error messages.
        device_mesh: has a dimension ``ep``.
        x: ``[N, D]`` in expert order; rows behind the last that is counted stay here, and get 0 from `combine`.
        num_tokens_per_expert: ``[E]``, rows of `x` for every expert, any numeric dtype.
        scores: ``[N]`` or ``[N, 1]``, travel with their rows.

    Returns:
        routed_input ``[R, D]`` in order of the local experts, tokens_per_expert ``[E/ep]`` with the dtype of
        `num_tokens_per_expert`, scores of these rows or None, and the context for `combine`.

    Raises:
        ValueError: more rows are counted than there are.
    """
    group = device_mesh.get_group("ep")
    counts = num_tokens_per_expert.to(torch.int64).contiguous()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    context = dispatch_context(counts, received, x.shape[0], group.size(), type(module).__name__)
    routed, routed_scores = _Dispatch.apply(x, scores, context, group)  # type: ignore[no-untyped-call]
    return routed, context.tokens_per_expert.to(num_tokens_per_expert.dtype), routed_scores, context


def combine(module: nn.Module, routed_output: Tensor, context: DispatchContext, device_mesh: DeviceMesh) -> Tensor:
    """Sends rows back to where `dispatch` took them from; collective.

    Args:
        module: the experts, for error messages.
        routed_output: ``[R, D]`` in the order of dispatch's routed_input; depends on it, see `tied`.
        context: what `dispatch` returned.

    Returns:
        ``[N, D]``.

    Raises:
        ValueError: not one row for each row that `dispatch` returned.
    """
    rows = sum(context.output_splits)
    if routed_output.dim() != 2 or routed_output.shape[0] != rows:
        raise ValueError(
            f"{type(module).__name__}: experts must return [{rows}, D], one row for each row that dispatch gave them, "
            f"got {tuple(routed_output.shape)}"
        )
    group = device_mesh.get_group("ep")
    return cast(Tensor, _Combine.apply(routed_output, context, group))  # type: ignore[no-untyped-call]


def tied(routed_output: Tensor, *sources: Tensor | None) -> Tensor:
    """`routed_output`, which depends on all `sources`: where it has no row, by gradients of zero.

    Experts that loop over their local experts may return a new tensor when none has a row; without a tie this rank's
    backward would leave out the exchanges that the others wait in, and its parameters would have no gradient.
    """
    if routed_output.shape[0]:
        return routed_output
    return cast(Tensor, _Tied.apply(routed_output, *sources))  # type: ignore[no-untyped-call]


class _Dispatch(torch.autograd.Function):
    """Rows, and the scores that go with them, to their experts' rank. One node, so that the two exchanges of backward
    have one order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor | None, context: DispatchContext, group: Any
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(context.permuted_indices)
        ctx.rest = (context.input_splits, context.output_splits, x.shape[0], group)
        splits = (context.input_splits, context.output_splits)
        routed = _send(x, context.permuted_indices, *splits, group)
        return routed, None if scores is None else _send(scores, context.permuted_indices, *splits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        found = [
            _return(g, indices, *ctx.rest) if needed and g is not None else None
            for g, needed in zip((grad, grad_scores), ctx.needs_input_grad[:2], strict=True)
        ]
        return *found, None, None


class _Combine(torch.autograd.Function):
    """The reverse of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: DispatchContext, group: Any) -> Tensor:
        ctx.save_for_backward(context.permuted_indices)
        ctx.rest = (context.input_splits, context.output_splits, group)
        return _return(
            rows, context.permuted_indices, context.input_splits, context.output_splits, context.input_shape[0], group
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return _send(grad, indices, *ctx.rest), None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *sources: Tensor | None) -> Tensor:
        ctx.sources = [None if source is None else (source.shape, source.dtype) for source in sources]
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            grad.new_zeros((), dtype=source[1]).expand(source[0]) if source and needed else None
            for source, needed in zip(ctx.sources, ctx.needs_input_grad[1:], strict=True)
        ]
        return grad, *zeros


def _send(
    rows: Tensor, indices: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: Any
) -> Tensor:
    """From the rank that has the token to the rank that has the expert: the order of dispatch, and of combine's
    backward."""
    sent = torch.ops.ep_fx.send_rows(rows, input_splits)
    arrived = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    dist.all_to_all_single(arrived, sent, list(output_splits), list(input_splits), group=group)
    return cast(Tensor, torch.ops.ep_fx.regroup(arrived, indices))


def _return(
    rows: Tensor,
    indices: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    num_rows: int,
    group: Any,
) -> Tensor:
    """From the rank that has the expert back to the rank that has the token; rows that were not sent are 0."""
    back = rows.new_empty((sum(input_splits), *rows.shape[1:]))
    own = torch.ops.ep_fx.ungroup(rows, indices)
    dist.all_to_all_single(back, own, list(input_splits), list(output_splits), group=group)
    # A backend may hold `back` a little longer than it waits for it (gloo's worker does); as a result it would hold the
    # graph, and the context in it. So the result is another tensor on the same memory.
    return cast(Tensor, torch.ops.ep_fx.pad_rows(back.detach(), (num_rows,)))
