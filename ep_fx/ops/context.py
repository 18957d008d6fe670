"""The context of a lowered exchange: what combine and both backwards need to know of their dispatch.

    counts (mine), counts_done (received)  ->  DispatchContext, with ONE wait for the device

Immutable, made of tensors and integers, held by no module: it lives as long as the call that made it.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DispatchContext(NamedTuple):
    """What one dispatch leaves to its combine.

    Args:
        permuted_indices: ``[R]``, puts received rows (by source rank, then expert) in expert order.
        input_splits: rows sent to each rank.
        output_splits: rows received from each rank.
        input_shape: ``(num_rows,)``, rows before dispatch, those that no expert takes included.
        tokens_per_expert: ``[E/ep]`` rows received for each local expert.
    """

    permuted_indices: Tensor
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    input_shape: tuple[int, ...]
    tokens_per_expert: Tensor


def regroup_indices(counts: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """How to put rows that arrive by source rank, then by local expert, in local-expert order, sources in order.

    Args:
        counts: ``[ep, E/ep]``, rows of each source rank for each local expert.
        total: sum of `counts`, if known; without it the device is waited for.

    Returns:
        tokens_per_expert ``[E/ep]`` and permuted_indices ``[total]``.
    """
    arrival_ends = counts.reshape(-1).cumsum(0).view(counts.shape)
    lengths = counts.t().reshape(-1)
    shift = (arrival_ends - counts).t().reshape(-1) - (lengths.cumsum(0) - lengths)
    spread = torch.repeat_interleave(shift, lengths, output_size=total)
    return counts.sum(0), spread + torch.arange(spread.shape[0], device=counts.device)


def dispatch_context(
    tokens_per_expert: Tensor, counts_done: Tensor, num_rows: int, ep_size: int, region: str
) -> DispatchContext:
    """The context of one dispatch; the only place where a region waits for the device.

    Args:
        tokens_per_expert: ``[E]``, this rank's rows for every expert.
        counts_done: ``[E]``, what every rank sends to this rank's experts, by source rank.
        num_rows: rows of the dispatch's input.
        ep_size: ranks of the exchange.
        region: module path, for errors.

    Raises:
        ValueError: the counts claim more rows than there are.
    """
    received = counts_done.view(ep_size, -1)
    input_splits, output_splits = exchange_splits(tokens_per_expert, received, num_rows, region)
    local, permuted_indices = regroup_indices(received, sum(output_splits))
    return DispatchContext(permuted_indices, input_splits, output_splits, (num_rows,), local)


def exchange_splits(
    tokens_per_expert: Tensor, received: Tensor, num_rows: int, region: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows that go to each rank and rows that come from each, with one wait for the device.

    Args:
        tokens_per_expert: ``[E]``, this rank's rows for every expert.
        received: ``[ep, E/ep]``, rows of each rank for this rank's experts.
        num_rows, region: as for `dispatch_context`.

    Raises:
        ValueError: the counts claim more rows than there are.
    """
    ep_size = received.shape[0]
    both = torch.cat((tokens_per_expert.view(ep_size, -1).sum(1), received.sum(1))).tolist()
    input_splits, output_splits = tuple(both[:ep_size]), tuple(both[ep_size:])
    check_rows(sum(input_splits), num_rows, region)
    return input_splits, output_splits


def check_rows(sent: int, num_rows: int, region: str) -> None:
    """Checks that no more rows are sent than there are; sizes that are not known are let pass.

    Raises:
        ValueError: more are.
    """
    if isinstance(sent, int) and isinstance(num_rows, int) and sent > num_rows:
        raise ValueError(f"dispatch of region {region!r}: {sent} rows are counted for experts, there are {num_rows}")
