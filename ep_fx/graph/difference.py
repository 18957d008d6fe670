"""What became of a list of nodes: new ones, lost ones, and as few moved ones as explain the new order. O(n log n)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Difference(Generic[T]):
    """Items that are new, gone, or in another place among those that stayed; each in the order of its list."""

    added: tuple[T, ...]
    removed: tuple[T, ...]
    moved: tuple[T, ...]


def compare(before: Sequence[T], after: Sequence[T]) -> Difference[T]:
    """What leads from `before` to `after`; the items of each are distinct."""
    place = {item: index for index, item in enumerate(before)}
    stayed = [item for item in after if item in place]
    kept = set(stayed)
    resting = _longest_rising([place[item] for item in stayed])
    return Difference(
        added=tuple(item for item in after if item not in place),
        removed=tuple(item for item in before if item not in kept),
        moved=tuple(item for item in stayed if place[item] not in resting),
    )


def _longest_rising(values: Sequence[int]) -> set[int]:
    """Members of a longest rising subsequence of distinct `values`."""
    ends: list[int] = []
    previous: dict[int, int | None] = {}
    for value in values:
        index = bisect_left(ends, value)
        previous[value] = ends[index - 1] if index else None
        ends[index : index + 1] = [value]
    found: set[int] = set()
    last = ends[-1] if ends else None
    while last is not None:
        found.add(last)
        last = previous[last]
    return found
