"""What the kernels of torch_npu demand of their arguments, as a table.

torch_npu's own Meta kernels pass almost anything; CANN refuses it on the device, or computes something else. `check`
looks at fake, meta or real values, and needs no torch_npu.

    check("npu_grouped_matmul", ([x], [weight]), {"group_list": counts, ...}).reason      a sentence, or None
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ep_fx.targets.npu.preconditions import dense, exchange, grouped, moe
from ep_fx.targets.npu.preconditions.build import Op
from ep_fx.targets.npu.preconditions.condition import Checked, Condition, Finding, known

OPS: dict[str, Op] = {op.name: op for op in (*moe.OPS, *grouped.OPS, *dense.OPS, *exchange.OPS)}
"""Operators by name, each with its conditions."""

__all__ = ["OPS", "Checked", "Condition", "Finding", "Op", "check"]


def check(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, result: Any = None, soc: str | None = None
) -> Checked:
    """Whether a call of ``torch.ops.npu.<op>`` meets the conditions of the kernel.

    Args:
        op: name of the operator.
        args, kwargs: of the call; tensors may be fake, sizes may be symbols. No guard is added.
        result: a tensor of the shape that the caller takes the (first) result to have; None: nothing is said of it.
        soc: the chip, ``"A2"`` or ``"A3"``; None: not known.

    Raises:
        KeyError: an operator that the table does not have.
        TypeError: an argument that the operator does not have.
    """
    if op not in OPS:
        raise KeyError(f"no conditions are known of npu.{op}; known are {', '.join(OPS)}")
    entry = OPS[op]
    arguments = {**entry.bind(args, dict(kwargs or {})), "result": result, "soc": soc}
    broken: list[Finding] = []
    open_: list[Finding] = []
    for condition in entry.conditions:
        seen = condition.look(arguments)
        if seen is None or (holds := known(seen.holds)) is True:
            continue
        (open_ if holds is None else broken).append(Finding(op, condition, seen.got))
    return Checked(tuple(broken), tuple(open_))
