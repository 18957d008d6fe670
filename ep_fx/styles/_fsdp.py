"""What FSDP2 knows about one parameter, and how it is told of a new one.

Private torch API used here, and only here: ``FSDPParam`` and ``FSDPParamGroup``, found in the hooks that they register
with their modules, for FSDP keeps no way from a module to an outer unit that shards it; of the one
``_init_sharded_param``, ``_init_extensions``, ``mesh_info``, ``sharded_param``, ``sharded_state``, ``fsdp_placement``
and ``_param_fqn``, of the other ``gradient_divide_factor`` and ``modules``; ``FSDPModule._get_fsdp_state`` for all
units below one root; ``DeviceMesh._get_root_mesh``.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def find(module: nn.Module, leaf: str) -> FSDPParam | None:
    """What FSDP keeps about the parameter `leaf` of `module`; None where it is not sharded by FSDP."""
    for found in _closed_over(module._load_state_dict_post_hooks):
        if isinstance(found, FSDPParam) and found._module_info.param_name == leaf:
            return found
    return None


def _closed_over(hooks: Mapping[int, Any]) -> Iterator[Any]:
    """What the functions among `hooks` hold."""
    for hook in hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            yield cell.cell_contents


def ranks_of(parameter: FSDPParam) -> set[int]:
    """The ranks over which FSDP reduces the gradient."""
    return set(parameter.mesh_info.mesh.mesh.flatten().tolist())


def reduces_over(parameter: FSDPParam, ranks: Sequence[int]) -> bool:
    """Whether FSDP averages the gradient over all of `ranks`."""
    return set(ranks) <= ranks_of(parameter)


def is_sharded(parameter: FSDPParam) -> bool:
    """Whether the parameter is sharded now, not gathered."""
    return parameter.sharded_state == ShardedState.SHARDED


def same_root(parameter: FSDPParam, mesh: DeviceMesh) -> bool:
    """Whether FSDP's mesh and `mesh` are parts of one mesh, as a DTensor on both needs."""
    return parameter.mesh_info.mesh._get_root_mesh() is mesh._get_root_mesh()


def replace(parameter: FSDPParam, whole: nn.Parameter) -> None:
    """Has FSDP shard the DTensor `whole` in place of what it sharded before, in the same unit and in the same way."""
    placement = parameter.fsdp_placement
    parameter._init_sharded_param(whole, parameter.device, lambda _: placement, parameter.mesh_info)
    parameter._init_extensions()
    parameter.all_gather_outputs = []
    if hasattr(parameter, "_unsharded_param"):
        del parameter._unsharded_param


class Unit(NamedTuple):
    """The FSDP unit that holds parameters of a module, known from the first forward on.

    Args:
        divide_factor: what a user set with ``set_gradient_divide_factor``.
        root: the outermost FSDP module.
        states: FSDP's state of every unit below `root`.
    """

    divide_factor: float | None
    root: nn.Module
    states: Sequence[Any]

    def members(self) -> Iterator[tuple[nn.Module, str, FSDPParam]]:
        """Every parameter of every unit below the root, with its module and its name below the root."""
        for state in self.states:
            for group in state._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    info = parameter._module_info
                    yield info.module, parameter._param_fqn or info.param_name, parameter


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of the parameters of `module`; None where FSDP does not hold them."""
    groups = (g for g in _closed_over(module._state_dict_pre_hooks) if isinstance(g, FSDPParamGroup))
    group = next(groups, None)
    if group is None:
        return None
    first = group.modules[0]
    assert isinstance(first, FSDPModule)
    states = first._get_fsdp_state()._state_ctx.all_states
    return Unit(group.gradient_divide_factor, states[0]._modules[0], states)
