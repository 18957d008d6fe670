"""`ep_fx_capture::tangent` marks, while a trace runs, where forward ends and what the incoming gradients look like.

It exists in raw traces only: every such node becomes a placeholder before anyone else sees the graph.
"""
from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("ep_fx_capture", "DEF")
_LIBRARY.define("tangent(Tensor like) -> Tensor")


def _tangent(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


_LIBRARY.impl("tangent", _tangent, "CompositeExplicitAutograd")
torch.library.register_fake("ep_fx_capture::tangent", _tangent, lib=_LIBRARY)

TANGENT = torch.ops.ep_fx_capture.tangent.default
