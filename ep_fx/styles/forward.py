"""The forward of styled experts: dispatch, the user's own body on this rank's parameters, combine.

The body runs as a method of a look-alike of the module that shares everything with it but its parameters, which are
the local tensors: nothing of the module is swapped, so calls may overlap. What the body assigns to itself ends up on
the module.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ep_fx.styles.exchange import combine, dispatch, tied
from ep_fx.styles.gradients import average_dense, check_fsdp, scaled_gradient
from ep_fx.styles.partial import enter, leave

_MARK = "ep_fx_style"


@dataclass(frozen=True)
class Split:
    """How one experts module is split; no module, and nothing that changes.

    Args:
        style: the style, for messages.
        path: of the experts in the module that the style was applied to, for messages.
        num_experts: over all ranks.
        mesh: the dimensions that the style splits over.
    """

    style: Any
    path: str
    num_experts: int
    mesh: DeviceMesh

    def size(self, dim: str) -> int:
        """Ranks along a mesh dimension; 1 where the style does not split over it."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(dim)) if dim in names else 1


def style_of(module: nn.Module) -> Any:
    """The style that was applied to `module` itself; None where there is none."""
    return getattr(module.__dict__.get("forward"), _MARK, None)


def check_forward(path: str, module: nn.Module) -> None:
    """Checks that forward can be wrapped.

    Raises:
        ValueError: a style was applied before, or the instance has a forward of its own.
    """
    if (style := style_of(module)) is not None:
        raise ValueError(f"{path}: {style} was applied to this module before; a style is applied once")
    if "forward" in module.__dict__:
        raise ValueError(
            f"{path}: this {type(module).__name__} has a forward of its own beside its class's; the style wraps the "
            "class's forward, apply it before anything that replaces forward on the instance"
        )


def wrap(module: nn.Module, forward: Callable[..., Any], style: Any) -> None:
    """Gives `module` the bound `forward`, with the signature of its class's; a copy of the module gets it too."""
    functools.update_wrapper(forward, type(module).forward)
    setattr(forward, _MARK, style)
    object.__setattr__(module, "forward", MethodType(forward, module))


def experts_forward(split: Split) -> Callable[..., Tensor]:
    """Forward of the experts themselves."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        call = inspect.signature(type(self).forward).bind(self, *args, **kwargs)
        own, x_name, counts_name, *others = list(call.arguments)
        x, counts = call.arguments[x_name], call.arguments[counts_name]
        scores_name = _scores_argument(split, call, others)
        scores = call.arguments[scores_name] if scores_name else None
        _check_call(split, x, counts, scores)
        local = local_view(self, 1 / split.size("ep"))
        context = None
        if split.size("ep") > 1:
            check_fsdp(f"{split.path}, {split.style}", self, split.mesh.get_group("ep"), style_of)
            x, counts, scores, context = dispatch(self, split.mesh, x, counts, scores)
        if split.size("tp") > 1:
            x, scores = enter(x, scores, split.mesh)
        call.arguments.update({own: local, x_name: x, counts_name: counts})
        if scores_name:
            call.arguments[scores_name] = scores
        y: Tensor = type(self).forward(*call.args, **call.kwargs)
        _keep_assigned(self, local)
        if split.size("tp") > 1:
            y = leave(y, split.mesh)
        if context is None:
            return y
        return combine(self, tied(y, x, scores, *local.parameters()), context, split.mesh)

    return forward


def owner_forward(split: Split, names: frozenset[str]) -> Callable[..., Any]:
    """Forward of a module that contains the experts.

    Args:
        names: the parameters that are split.
    """
    group = split.mesh.get_group("ep")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        average_dense(self, names, group)
        return type(self).forward(self, *args, **kwargs)

    return forward


def local_view(module: nn.Module, factor: float) -> nn.Module:
    """A look-alike of `module` whose parameters are this rank's parts of them, with gradients times `factor`."""
    view = object.__new__(type(module))
    view.__dict__.update(module.__dict__)
    del view.__dict__["forward"]
    view.__dict__["_parameters"] = {
        name: None if p is None else _local(p, factor) for name, p in module._parameters.items()
    }
    return view


def _local(parameter: Tensor, factor: float) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return scaled_gradient(local, factor) if factor != 1 and local.requires_grad else local


def _keep_assigned(module: nn.Module, view: nn.Module) -> None:
    own = module.__dict__
    for name, value in view.__dict__.items():
        if name != "_parameters" and (name not in own or own[name] is not value):
            own[name] = value


def _scores_argument(split: Split, call: inspect.BoundArguments, others: list[str]) -> str | None:
    tensors = [name for name in others if isinstance(call.arguments[name], Tensor)]
    if len(tensors) > 1:
        raise ValueError(f"{split.path}: besides x and the counts one tensor of scores [N] is accepted, got {tensors}")
    return tensors[0] if tensors else None


def _check_call(split: Split, x: Any, counts: Any, scores: Tensor | None) -> None:
    if x.dim() != 2 or tuple(counts.shape) != (split.num_experts,):
        raise ValueError(
            f"{split.path}: expected x [N, D] in expert order and counts [{split.num_experts}], the number of experts "
            f"over all ranks, got {tuple(x.shape)} and {tuple(counts.shape)}"
        )
    if scores is not None and tuple(scores.shape) not in ((x.shape[0],), (x.shape[0], 1)):
        raise ValueError(f"{split.path}: scores must be [{x.shape[0]}] or [{x.shape[0]}, 1], got {tuple(scores.shape)}")
