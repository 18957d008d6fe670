"""What torch_npu's fused kernels compute, in plain torch on CPU tensors, one function per operator.

Written from the documented formulas, with fp32 sums; arguments as in ``schemas.txt``. Sources, by their short names:

    [DOC]   docstrings of the torch_npu 2.13.0 wheel, ``torch_npu/_op_plugin_docs.py``
    [META]  shapes by the same wheel, ``torch_npu/op_plugin/meta/_meta_registrations.py``
    [OPP]   Ascend/op-plugin at 517f2e7d, ``docs/zh/custom_APIs/torch_npu``
    [ACL]   CANN ops-transformer at a093e954, ``moe/*/docs/aclnn*.md``

Zero rows and groups of size 0 are computed too. Results share no memory with arguments, but where a name ends in ``_``.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ep_fx.testing.npu.reference import attention, matmul, pointwise, routing

_MODULES = (routing, matmul, pointwise, attention)

REFERENCES: dict[str, Callable[..., Any]] = {
    name: function
    for module in _MODULES
    for name, function in vars(module).items()
    if name.startswith("npu_") and callable(function)
}
"""By the name of the operator. Those that communicate are in `exchange`, and need to be told how."""

__all__ = ["REFERENCES"]
