"""All ranks of a mesh hold the same plan, or all of them stop with the same message (rule `spmd`).

A rank whose parameters stand in another order, or whose graph communicates in another order, does not fail by itself:
its collectives meet others of equal size, and numbers end up in the wrong place. So the ranks compare what they are
about to do, line by line, while nothing has run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class DisagreementError(ValueError):
    """Ranks of one mesh differ in what they are about to do."""


def agree(mesh: DeviceMesh, what: str, lines: Sequence[str]) -> bool:
    """Compares `lines` over all ranks of `mesh`; collective.

    Args:
        what: what the lines describe, for the message.

    Returns:
        True where they were compared, False on a fake process group, whose ranks do not exist.

    Raises:
        DisagreementError: on every rank, with the first line that differs and the two ranks.
    """
    if dist.get_backend(mesh.get_group(0)) == "fake":
        return False
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(_from_all(mesh, digest).values())) == 1:
        return True
    every = _from_all(mesh, list(lines))
    first = min(every)
    other = min(rank for rank, theirs in every.items() if theirs != every[first])
    place, (one, two) = next(
        (index, pair) for index, pair in enumerate(zip_longest(every[first], every[other])) if pair[0] != pair[1]
    )
    raise DisagreementError(
        f"the ranks differ in their {what}, first at line {place + 1}:\n"
        f"  rank {first}: {one or 'nothing more'}\n  rank {other}: {two or 'nothing more'}\n"
        "every rank must transform the same model with the same options, and call it in the same way"
    )


@contextmanager
def stages_together(pipeline: DeviceMesh | None) -> Iterator[None]:
    """Around what may fail on one stage of a pipeline: leaves on every rank of all stages, or raises on every rank.

    Args:
        pipeline: the mesh of all stages; None: there are none to wait for.

    Raises:
        DisagreementError: another stage was stopped by an error, and this one was not.
    """
    if pipeline is None or dist.get_backend(pipeline.get_group(0)) == "fake":
        yield
        return
    try:
        yield
    except Exception as error:
        _from_all(pipeline, f"{type(error).__name__}: {error}")
        raise
    stopped = {rank: text for rank, text in _from_all(pipeline, "").items() if text}
    if stopped:
        rank = min(stopped)
        raise DisagreementError(
            f"rank {rank}, of another stage of the mesh {pipeline.mesh_dim_names}, was stopped in transform by "
            f"{stopped[rank]}"
        )


def _from_all(mesh: DeviceMesh, value: T) -> dict[int, T]:
    """The value of every rank of `mesh`, by global rank: gathered along one dimension after the other."""
    found = {dist.get_rank(): value}
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            parts: list[dict[int, T] | None] = [None] * mesh.size(dim)
            dist.all_gather_object(parts, found, group=mesh.get_group(dim))
            found = {rank: item for part in parts if part is not None for rank, item in part.items()}
    return found
