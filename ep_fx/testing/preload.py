"""What the fork server imports once, so that every rank starts with it in memory.

Imported only by the fork server of `ep_fx.testing.ranks`. A module belongs here when a rank would otherwise spend
a noticeable time on importing it, and when importing it starts no thread.
"""
from __future__ import annotations

import contextlib
import importlib

MODULES = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed._functional_collectives",
    "torch.distributed.pipelining",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch._export.non_strict_utils",
    "torch._functorch.aot_autograd",
    "ep_fx.graph",
    "ep_fx.testing.ranks",
    "pytest",
    "networkx",
    "transformers.modeling_utils",
    "transformers.models.mixtral.modeling_mixtral",
)

for _name in MODULES:
    with contextlib.suppress(ImportError):  # pytest and transformers are optional
        importlib.import_module(_name)
