"""What FSDP2 knows about one parameter, and how it is told of a new one.

Private torch API used here, and only here: ``FSDPParam`` (found in the hook that it registers with its module, for
FSDP keeps no way from a module to an outer unit that shards it), its ``_init_sharded_param``, ``_init_extensions``,
``mesh_info``, ``sharded_param``, ``sharded_state``, ``fsdp_placement``; ``FSDPModule._get_fsdp_state`` and the
``gradient_divide_factor`` of its groups; ``DeviceMesh._get_root_mesh``.
"""
from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState


def find(module: nn.Module, leaf: str) -> FSDPParam | None:
    """What FSDP keeps about the parameter `leaf` of `module`; None where it is not sharded by FSDP."""
    for hook in module._load_state_dict_post_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            found = cell.cell_contents
            if isinstance(found, FSDPParam) and found._module_info.param_name == leaf:
                return found
    return None


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


def divide_factor(module: nn.Module) -> float | None:
    """The factor that a user set with ``set_gradient_divide_factor`` on the unit `module`; None where there is none."""
    if not isinstance(module, FSDPModule):
        return None
    factors = [group.gradient_divide_factor for group in module._get_fsdp_state()._fsdp_param_groups]
    return next((factor for factor in factors if factor is not None), None)
