"""Applies a style to a module by hand: find the experts, check, split their parameters, wrap forward."""
from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.ops.library import use_kernels
from ep_fx.styles.calls import CALLS
from ep_fx.styles.forms import EAGER_FORMS, form_of
from ep_fx.styles.forward import Split, check_forward, owner_forward, style_of, wrap
from ep_fx.styles.split import check_split, split_names, split_parameters


def apply_style(style: Any, dims: tuple[str, ...], module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """See `Style.apply`.

    Args:
        dims: the mesh dimensions that `style` splits over.
    """
    mesh = _mesh_of(style, dims, device_mesh)
    path, experts = _find_experts(style, module)
    where = path or type(module).__name__
    for name, owner in {where: experts, type(module).__name__: module}.items():
        check_forward(name, owner)
    form = form_of(experts)
    assert form is not None
    number = form.num_experts(experts)
    names = split_names(experts, number)
    check_split(where, experts, names, number, mesh)
    use_kernels(mesh.device_type)
    split_parameters(experts, names, mesh)
    split = Split(style, where, number, frozenset(names), mesh)
    wrap(experts, CALLS[form](split), style)
    if experts is not module and split.size("ep") > 1:
        prefix = f"{path}." if path else ""
        wrap(module, owner_forward(frozenset(prefix + name for name in names), mesh.get_group("ep")), style)
    return module


def applied_style(module: nn.Module) -> tuple[str, Any] | None:
    """Path and style of the first experts below `module` to which a style was applied; None where there are none."""
    styled = {path: style for path, part in module.named_modules() if (style := style_of(part)) is not None}
    for path, style in styled.items():
        if not any(other != path and (not path or other.startswith(f"{path}.")) for other in styled):
            return path, style
    return None


def _mesh_of(style: Any, dims: tuple[str, ...], mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    missing = [dim for dim in dims if dim not in names]
    if missing:
        raise ValueError(
            f"{style} splits experts over the mesh dimensions {dims}, and the mesh of shape {tuple(mesh.shape)} has "
            f"{names or 'no names'}; {missing} must be among its mesh_dim_names"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}; only its ranks may apply {style}")
    return mesh if names == dims else mesh[dims]


def _find_experts(style: Any, module: nn.Module) -> tuple[str, nn.Module]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{style}.apply takes a torch.nn.Module, got {type(module).__name__}")
    found = {path: part for path, part in module.named_modules() if form_of(part) is not None}
    if len(found) != 1:
        what = f"{len(found)} experts modules, {list(found)[:4]}; apply it to each" if found else "no experts"
        raise ValueError(
            f"{style}.apply takes experts, or a module that contains exactly one; {type(module).__name__} contains "
            f"{what}. Forms: {[form.text for form in EAGER_FORMS]}"
        )
    return next(iter(found.items()))
