"""``torch.ops.npu`` without torch_npu: the frozen schemas of 2.13.0, their references as kernels, on npu tensors only.

Every call is checked as the device would (`checks`). A call that autograd would record is an error: for many of these
operators torch_npu has no formula and loses the gradient without a word, and a graph of ep_fx holds its own backward.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ep_fx.testing.npu import dist
from ep_fx.testing.npu.checks import CHECKS
from ep_fx.testing.npu.device import run
from ep_fx.testing.npu.reference import REFERENCES, exchange

NAMESPACE = "npu"
_LIBRARIES: list[torch.library.Library] = []


def schemas() -> dict[str, str]:
    """The schema of each operator by name, without its namespace."""
    lines = (files(__package__) / "schemas.txt").read_text().splitlines()
    texts = [line.removeprefix(f"{NAMESPACE}::") for line in lines if line.startswith(f"{NAMESPACE}::")]
    return {text[: text.index("(")]: text for text in texts}


def install() -> None:
    """Defines the operators; again is harmless."""
    if _LIBRARIES:
        return
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in schemas().items():
        library.define(schema)
        op = getattr(torch.ops.npu, name).default
        library.impl(name, functools.partial(_on_device, op), "PrivateUse1")
        library.impl(name, functools.partial(_recorded, op), "AutogradPrivateUse1")
    _LIBRARIES.append(library)


def _on_device(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return run(op, functools.partial(_checked, op), *args, **kwargs)


def _checked(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    name, arguments = op._schema.name.removeprefix(f"{NAMESPACE}::"), _bound(op, args, kwargs)
    try:
        CHECKS[name](**arguments)
        return _KERNELS[name](**arguments)
    except ValueError as error:
        raise ValueError(f"{op._schema.name}: {error}") from error


def _bound(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument by name, defaults included."""
    parameters = op._schema.arguments
    defaults = {parameter.name: parameter.default_value for parameter in parameters}
    return {**defaults, **{parameter.name: value for parameter, value in zip(parameters, args, strict=False)}, **kwargs}


def _recorded(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))):
        raise RuntimeError(
            f"{op._schema.name} was called with a tensor that requires a gradient: call it below autograd, with its "
            "backward in the graph; torch_npu has no formula for many of its operators, and would lose the gradient"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


# -- kernels that communicate ------------------------------------------------------------------------------------------
def _alltoallv_gmm(
    gmm_x: Tensor, gmm_weight: Tensor, hcom: str, ep_world_size: int, send_counts: list[int], recv_counts: list[int],
    trans_gmm_weight: bool, permute_out_flag: bool, **_: Any,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    y, rows = exchange.npu_alltoallv_gmm(
        dist.exchange_of(hcom, ep_world_size), gmm_x, gmm_weight, ep_world_size, send_counts, recv_counts,
        trans_gmm_weight=trans_gmm_weight, permute_out_flag=permute_out_flag,
    )  # fmt: skip
    return y, None, rows


def _gmm_alltoallv(
    gmm_x: Tensor, gmm_weight: Tensor, hcom: str, ep_world_size: int, send_counts: list[int], recv_counts: list[int],
    trans_gmm_weight: bool, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    y = exchange.npu_gmm_alltoallv(
        dist.exchange_of(hcom, ep_world_size), gmm_x, gmm_weight, ep_world_size, send_counts, recv_counts,
        trans_gmm_weight=trans_gmm_weight,
    )  # fmt: skip
    return y, None


_KERNELS: dict[str, Callable[..., Any]] = {
    **REFERENCES, "npu_alltoallv_gmm": _alltoallv_gmm, "npu_gmm_alltoallv": _gmm_alltoallv,
}  # fmt: skip
