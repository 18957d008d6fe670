"""Tables for people: rows of text, and rows that say the same of many layers folded into one.

    model.layers.3.mlp.experts   3   fsdp          model.layers.[3-60].mlp.experts (58x)   3   fsdp
    model.layers.4.mlp.experts   3   fsdp    ->
    ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Args:
        title: what it shows.
        columns: heads.
        rows: cells, as many as there are heads.
        note: a line under the table, may be empty.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __str__(self) -> str:
        cells = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        body = [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
        return "\n".join([self.title, *body, *([self.note] if self.note else [])]) + "\n"


def fold(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """`rows` with those that differ in the first index of their first cell alone made one."""
    groups: dict[tuple[str, ...], list[tuple[int | None, tuple[str, ...]]]] = {}
    for row in rows:
        match = _INDEX.search(row[0])
        pattern = _INDEX.sub("\0", row[0], count=1)
        groups.setdefault((pattern, *row[1:]), []).append((int(match[0]) if match else None, row))
    return tuple(_folded(key, members) for key, members in groups.items())


def _folded(key: tuple[str, ...], members: list[tuple[int | None, tuple[str, ...]]]) -> tuple[str, ...]:
    indices = [index for index, _ in members if index is not None]
    if len(members) == 1:
        return members[0][1]
    spans = _spans(sorted(set(indices)))
    name = key[0].replace("\0", f"[{spans}]") if indices else key[0]
    return (f"{name} ({len(members)}x)", *key[1:])


def _spans(indices: Sequence[int]) -> str:
    """``0, 3-60`` for the numbers 0, 3, 4, .., 60."""
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(indices)) if b != a + 1), len(indices)]
    runs = [(indices[a], indices[b - 1]) for a, b in pairwise(starts) if a < b]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def plain(value: Any) -> Any:
    """`value` as JSON knows it: dataclasses as objects, enums by value, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
