"""What the dispatcher says once the real torch_npu is imported: the source of the lists that the target is held to.

`aten_kernels` and `aten_compositions` are frozen in ``ep_fx/targets/npu/aten_ops.txt`` and ``aten_compositions.txt``,
so that a graph can be lowered and explained where there is no torch_npu. `make test-npu-sim` compares both with the
installed wheel; ``make test-npu-sim ARGS=--update-golden`` rewrites them.

How torch_npu marks an operator that runs on the CPU: it has no kernel for it (a fallback of the whole key then runs
the CPU's), or its kernel does nothing but warn and run the CPU's (`RUNS_ON_CPU`; the warnings are texts of the wheel).

Private torch API used here: ``_dispatch_get_all_op_names``, ``_dispatch_has_kernel_for_dispatch_key``,
``_dispatch_dump_table``.
"""
from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import torch

RUNS_ON_CPU = frozenset(
    {
        "_fused_adam_",
        "_masked_softmax",
        "_transform_bias_rescale_qkv",
        "logit",
        "logit_",
        "logit_backward",
        "scatter_reduce",
        "scatter_reduce_",
        "unfold_backward",
    }
)
"""Operators whose kernel in torch_npu 2.13.0 runs the CPU's, always or for arguments that are not seen in advance."""

_KEYS = ("PrivateUse1", "AutogradPrivateUse1")
_TORCH_OWN = ("[default backend kernel]", "[math kernel]")


def aten_kernels() -> list[str]:
    """Operators of ATen with a kernel in torch_npu that runs on the device, sorted, e.g. ``aten.silu.default``."""
    return sorted(
        name
        for full, name in _aten()
        if any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in _KEYS)
        and _packet(full) not in RUNS_ON_CPU
    )


def aten_compositions() -> list[str]:
    """Operators of ATen that an npu tensor runs as PyTorch's own composition of others, views among them, sorted."""
    return sorted(
        name
        for full, name in _aten()
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in _KEYS)
        and any(
            line.startswith("PrivateUse1:") and line.endswith(_TORCH_OWN)
            for line in torch._C._dispatch_dump_table(full).splitlines()
        )
    )


def _aten() -> Iterator[tuple[str, str]]:
    """Every operator of PyTorch's ATen: its name in the dispatcher, and as ``str`` of the overload has it."""
    for full in torch._C._dispatch_get_all_op_names():
        packet, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith("aten::") and not packet.removeprefix("_").startswith("npu_"):  # torch_npu's old names
            yield full, f"aten.{packet}.{overload or 'default'}"


def _packet(full: str) -> str:
    return full.removeprefix("aten::").partition(".")[0]


def texts() -> dict[str, str]:
    """The frozen files of ``ep_fx/targets/npu``, as the imported torch_npu has them: text by file name."""
    return {
        "aten_ops.txt": _text("have a kernel in torch_npu that runs on the device", aten_kernels()),
        "aten_compositions.txt": _text(
            "run on an npu tensor as PyTorch's composition of others, views among them", aten_compositions()
        ),
    }


def _text(what: str, names: list[str]) -> str:
    head = (
        f"# Operators of ATen that {what}.\n"
        f"# Of torch {torch.__version__.partition('+')[0]} and torch_npu {version('torch_npu')}; "
        "what is in neither list runs on the CPU.\n"
        "# Rewritten by: make test-npu-sim ARGS=--update-golden\n"
    )
    return head + "".join(f"{name}\n" for name in names)
