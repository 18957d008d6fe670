"""What a condition is: a sentence about the arguments of one operator that is true, false, or not known yet.

A size that is a symbol may leave a condition open. It is then a condition of the run: no violation, but listed. Nothing
here adds a guard to a graph.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

Arguments = Mapping[str, Any]
"""The arguments of a call by name, defaults included; those without are None.

Besides: ``result``, what the caller takes the result to be, and ``soc``, the chip; None where nobody said.
"""


class Seen(NamedTuple):
    """What a condition found.

    Args:
        holds: a bool, a SymBool where sizes are symbols, or None where values would have to be read.
        got: what is there, as text.
    """

    holds: Any
    got: str


Look = Callable[[Arguments], Seen | None]
"""What a condition finds in arguments; None where it says nothing of them (an optional argument that is absent)."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One line of the table.

    Args:
        argument: of the operator that it speaks of.
        wants: what must be there, as text.
        limit: the number in `wants`, None where there is none.
        unit: of what `limit` is a number.
        source: where this stands.
        remedy: what to do where it is broken.
        look: finds out.
    """

    argument: str
    wants: str
    limit: int | None
    unit: str
    source: str
    remedy: str
    look: Look


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that is broken, or open, in one call.

    Args:
        op: the operator.
        condition: of it.
        got: what is there instead, or the size that is not known.
    """

    op: str
    condition: Condition
    got: str

    @property
    def expected(self) -> str:
        """What must be there."""
        return f"{self.condition.argument}: {self.condition.wants}"

    @property
    def remedy(self) -> str:
        """What would mend it."""
        return self.condition.remedy

    def __str__(self) -> str:
        return f"{self.op}: expected {self.expected}, got {self.got} [{self.condition.source}]; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Checked:
    """What `check` found.

    Args:
        broken: conditions that do not hold.
        at_run_time: conditions that depend on sizes which are not known yet.
    """

    broken: tuple[Finding, ...]
    at_run_time: tuple[Finding, ...]

    @property
    def reason(self) -> str | None:
        """The first broken condition as a sentence; None where none is."""
        return str(self.broken[0]) if self.broken else None


def known(holds: Any) -> bool | None:
    """`holds` as a bool; None where that depends on the values of symbols."""
    if holds is None:
        return None
    if isinstance(holds, torch.SymBool):
        if statically_known_true(holds):
            return True
        return False if statically_known_true(torch.sym_not(holds)) else None
    return bool(holds)
