"""Ascend without Ascend, for tests: the device `npu`, its collectives and its fused operators, in Python.

    RankPool(4, device="npu")        ranks that have all three; nothing is installed in the calling process
    local_mesh(fsdp=2, ep=2)         on such ranks: a mesh of npu devices
"""
from __future__ import annotations

from ep_fx.testing.npu.watch import ForbiddenError, forbidden, only, recorded

__all__ = ["ForbiddenError", "forbidden", "install", "only", "recorded"]


def install() -> None:
    """Makes this process one that has an NPU: device, backend ``hccl``, and operators of the namespace ``npu``.

    Raises:
        RuntimeError: torch_npu, or another device of the kind, is there already.
    """
    from ep_fx.testing.npu import device, dist, shim

    device.install()
    dist.install()
    shim.install()
