"""Layouts of parameters on the mesh, and DTensors in and out."""

from ep_fx.sharding.agree import DisagreementError, agree, stages_together
from ep_fx.sharding.layout import (
    as_dtensor,
    cut_over_tp,
    is_packed,
    local_shard,
    make_layout,
    placements,
    shard_parameter,
    whole_over_tp,
)
from ep_fx.sharding.mesh import mesh_spec, stages_to_join
from ep_fx.sharding.units import ROOT, find_units

__all__ = [
    "DisagreementError",
    "ROOT",
    "agree",
    "as_dtensor",
    "cut_over_tp",
    "find_units",
    "is_packed",
    "local_shard",
    "make_layout",
    "mesh_spec",
    "placements",
    "shard_parameter",
    "stages_to_join",
    "stages_together",
    "whole_over_tp",
]
