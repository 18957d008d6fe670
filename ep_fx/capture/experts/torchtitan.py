"""Form 4: torchtitan's routed experts, ``(token_dispatcher, inner_experts)``.

For the time of a capture the dispatcher object, which is no module and holds no weight, is another one with the same
two methods, in terms of the dialect; router, experts and the counts in buffers are traced as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ep_fx.capture.experts.base import Cut, Experts, cut_by_name, where

_DISPATCHERS = ("LocalTokenDispatcher", "AllToAllTokenDispatcher")
"""Classes of torchtitan 0.3 whose result is known: rows in expert order in, rows weighted by the scores out."""


class TorchTitan:
    """Recognises a module with a token dispatcher and experts inside, by these attributes."""

    name = "torchtitan"
    form = f"torchtitan's routed experts (token_dispatcher, inner_experts), with a {' or '.join(_DISPATCHERS)}"

    def accepts(self, module: nn.Module) -> bool:
        """Whether the module has the parts."""
        dispatcher, inner = getattr(module, "token_dispatcher", None), getattr(module, "inner_experts", None)
        return hasattr(dispatcher, "dispatch") and hasattr(dispatcher, "combine") and isinstance(inner, nn.Module)

    def num_experts(self, module: nn.Module) -> int:
        """Dim 0 of the experts' parameters.

        Raises:
            ValueError: a dispatcher that does something else than torchtitan's own, or no experts' parameters.
        """
        dispatcher: Any = type(module.token_dispatcher)
        if dispatcher.__name__ not in _DISPATCHERS or not dispatcher.__module__.startswith("torchtitan."):
            raise ValueError(
                f"{type(module).__name__} ({where(module)}): its token_dispatcher is a {dispatcher.__module__}."
                f"{dispatcher.__name__}; accepted: {', '.join(_DISPATCHERS)} of torchtitan, or a class given to "
                "ep_fx.register_experts(cls, fn)"
            )
        shapes = [p.shape for p in cast(nn.Module, module.inner_experts).parameters()]
        sizes = {shape[0] if len(shape) == 3 else 0 for shape in shapes}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                f"{type(module).__name__} ({where(module)}): its inner_experts must have 3-D parameters [E, ..] only, "
                f"got {[tuple(shape) for shape in shapes]}"
            )
        return int(sizes.pop())

    def cut(self, module: nn.Module, name: str) -> Cut | None:
        """By the first part of the name, as in ``w1_EFD``, ``w2_EDF``; see `cut_by_name`."""
        return cut_by_name(name.rpartition(".")[2].partition("_")[0])

    @contextmanager
    def install(self, experts: Sequence[Experts]) -> Iterator[None]:
        """Swaps the dispatchers until the end."""
        own = [cast(Any, item.module).token_dispatcher for item in experts]
        try:
            for item in experts:
                cast(Any, item.module).token_dispatcher = _Dispatcher(item)
            yield
        finally:
            for item, dispatcher in zip(experts, own, strict=True):
                cast(Any, item.module).token_dispatcher = dispatcher


class _Sent(NamedTuple):
    """What combine needs of dispatch."""

    order: Tensor
    scores: Tensor
    indices: Tensor
    splits: Any
    rows: Any


class _Dispatcher:
    """The two methods of a token dispatcher."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def dispatch(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, _Sent]:
        """Tokens [T, D], scores and ids [T, K], counts [E] to rows [R, D] of the local experts and their counts."""
        ops, e = torch.ops.ep_fx, self._experts
        rows, of_experts, order = ops.permute(x, ids, e.num_experts)
        routed, _, local, indices, splits = ops.dispatch(rows, of_experts, None, e.ep, e.path)
        return e.enter(routed), local.to(counts.dtype), _Sent(order, scores, indices, splits, rows.shape[0])

    def combine(self, routed: Tensor, sent: _Sent, x: Tensor) -> Tensor:
        """Rows [R, D] of the local experts back to tokens [T, D], weighted by the scores."""
        ops = torch.ops.ep_fx
        routed_output = self._experts.leave(routed)
        back = ops.combine(routed_output, sent.indices, sent.splits, sent.rows, self._experts.path)
        return cast(Tensor, ops.unpermute(back, sent.order, sent.scores).to(x.dtype))
