"""The forward of styled experts: dispatch, the user's own body on this rank's parameters, combine.

The body runs as a method of a look-alike of the module that shares everything with it but its parameters, which are
the local tensors: nothing of the module is swapped, so calls may overlap. What the body assigns to itself ends up on
the module.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ep_fx.styles.exchange import combine, dispatch, tied
from ep_fx.styles.gradients import average_dense, check_fsdp, scaled_gradient
from ep_fx.styles.partial import enter, leave

Body = Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor]
_MARK = "ep_fx_style"


@dataclass(frozen=True)
class Split:
    """How one experts module is split; no module, and nothing that changes.

    Args:
        style: the style, for messages.
        path: of the experts in the module that the style was applied to, for messages.
        num_experts: over all ranks.
        names: the experts' parameters that are split.
        mesh: the dimensions that the style splits over.
    """

    style: Any
    path: str
    num_experts: int
    names: frozenset[str]
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


def owner_forward(names: frozenset[str], group: Any) -> Callable[..., Any]:
    """Forward of a module that contains the experts.

    Args:
        names: its parameters that are split.
        group: ranks along ``ep``.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        average_dense(self, names, group)
        return type(self).forward(self, *args, **kwargs)

    return forward


def through_experts(
    split: Split,
    module: nn.Module,
    x: Tensor,
    counts: Tensor,
    scores: Tensor | None,
    body: Body,
    attributes: Mapping[str, Any] | None = None,
) -> Tensor:
    """Rows to the ranks of their experts, through `body`, and back.

    Args:
        x, counts, scores: ``[N, D]`` in expert order, ``[E]`` and ``[N]`` or ``[N, 1]``.
        body: called with a look-alike of `module`, and rows, counts and scores of the local experts.
        attributes: attributes that the look-alike has in place of the module's.
    """
    ep = split.size("ep")
    context = None
    if ep > 1:
        group = split.mesh.get_group("ep")
        average_dense(module, split.names, group)
        check_fsdp(f"{split.path}, {split.style}", module, group, style_of)
        x, counts, scores, context = dispatch(module, split.mesh, x, counts, scores)
    if split.size("tp") > 1:
        x, scores = enter(x, scores, split.mesh)
    with local_view(module, 1 / ep, attributes or {}) as local:
        y = body(local, x, counts, scores)
        parameters = tuple(local.parameters())
    if split.size("tp") > 1:
        y = leave(y, split.mesh)
    if context is None:
        return y
    return combine(module, tied(y, x, scores, *parameters), context, split.mesh)


@contextmanager
def local_view(module: nn.Module, factor: float, attributes: Mapping[str, Any]) -> Iterator[nn.Module]:
    """A look-alike of `module` whose parameters are this rank's parts of them, with gradients times `factor`.

    Args:
        attributes: attributes that it has in place of the module's.
    """
    view = object.__new__(type(module))
    own = view.__dict__
    own.update(module.__dict__)
    del own["forward"]
    own["_parameters"] = {name: None if p is None else _local(p, factor) for name, p in module._parameters.items()}
    own.update(attributes)
    before = dict(own)
    yield view
    module.__dict__.update({n: value for n, value in own.items() if n not in before or before[n] is not value})


def _local(parameter: Tensor, factor: float) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local()
    return scaled_gradient(local, factor) if factor != 1 and local.requires_grad else local
