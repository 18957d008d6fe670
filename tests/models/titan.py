"""torchtitan's MoE block, unmodified, in a small model; none of it needs a device.

Importing torchtitan's MoE imports triton for kernels of dispatchers that are not used here; where triton is missing, an
empty module of that name stands in for the time of the import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

HAS_TITAN = all(importlib.util.find_spec(name) for name in ("torchtitan", "spmd_types", "tyro"))


_OF_TORCH = (
    "torch._inductor.runtime.triton_compat", "torch._inductor.runtime.hints", "torch._inductor.compile_fx",
    "torch._higher_order_ops.triton_kernel_wrap",
)  # fmt: skip


class _Missing(types.ModuleType):
    """Has every attribute; ``jit`` decorates nothing."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda fn=None, **_: fn or (lambda inner: inner)) if name == "jit" else mock.MagicMock()


@contextmanager
def _without_triton() -> Iterator[None]:
    if importlib.util.find_spec("triton"):
        yield
        return
    for name in _OF_TORCH:  # these look for triton, and must find that there is none
        importlib.import_module(name)
    names = [f"triton{part}" for part in ("", ".language", ".runtime", ".compiler")]
    stubs = {name: _Missing(name) for name in names}
    for name, stub in stubs.items():
        stub.__spec__ = ModuleSpec(name, None)
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


@functools.cache
def titan() -> Any:
    """The module of torchtitan's MoE, with its parts."""
    with _without_triton():
        from torchtitan.models.common import feed_forward, linear, moe, token_dispatcher
    parts = {**vars(moe), **vars(token_dispatcher), "Linear": linear.Linear, "FeedForward": feed_forward.FeedForward}
    return types.SimpleNamespace(**{name: part for name, part in parts.items() if not name.startswith("__")})


def titan_moe(dim: int = 16, hidden: int = 32, num_experts: int = 4, top_k: int = 2, **router: Any) -> nn.Module:
    """A block with a shared expert; the weights are not set."""
    t = titan()

    def linear(inputs: int, outputs: int) -> Any:
        return t.Linear.Config(in_features=inputs, out_features=outputs, bias=False)

    experts = t.RoutedExperts.Config(
        inner_experts=t.GroupedExperts.Config(dim=dim, hidden_dim=hidden, num_experts=num_experts),
        token_dispatcher=t.LocalTokenDispatcher.Config(num_experts=num_experts, top_k=top_k),
    )
    shared = t.FeedForward.Config(w1=linear(dim, 8), w2=linear(8, dim), w3=linear(dim, 8))
    gate = t.TokenChoiceTopKRouter.Config(num_experts=num_experts, top_k=top_k, gate=linear(dim, num_experts), **router)
    return t.MoE.Config(num_experts=num_experts, routed_experts=experts, router=gate, shared_experts=shared).build()


class TitanModel(nn.Module):
    """Token ids [B, S] to logits [B, S, 32], with random weights and a routing bias that is not zero."""

    def __init__(self, **router: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.moe = titan_moe(**router)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
            self.moe.expert_bias_E.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        return self.head(h + self.moe(h))
