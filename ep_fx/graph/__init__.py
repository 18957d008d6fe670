"""The graph that passes rewrite and rules read: nodes, roles, aliases, Manifest, passes."""

from ep_fx.graph.aliases import alias_root, alias_sources, aliases_of
from ep_fx.graph.equal import graph_difference, graph_equal
from ep_fx.graph.groups import bind_groups
from ep_fx.graph.history import History, Note
from ep_fx.graph.info import NodeInfo, Phase, copy_info, info_of, is_backward, set_info
from ep_fx.graph.manifest import (
    DATA_DIMS,
    MESH_DIMS,
    BufferSpec,
    Layout,
    Manifest,
    MeshSpec,
    ParameterSpec,
    RegionSpec,
)
from ep_fx.graph.parallel_graph import ParallelGraph
from ep_fx.graph.parser import ParseError, parse_graph
from ep_fx.graph.passes import ContractError, Pass, PassError, PassManager, PassRecord, check_contracts, format_records
from ep_fx.graph.pipeline import parse_pipeline, print_pipeline
from ep_fx.graph.printer import print_graph
from ep_fx.graph.regions import RegionNodes, find_regions
from ep_fx.graph.roles import Role, is_collective, is_effect, is_mutation, role_of, target_name
from ep_fx.graph.split import Halves, split

__all__ = [
    "DATA_DIMS",
    "MESH_DIMS",
    "BufferSpec",
    "ContractError",
    "Halves",
    "History",
    "Layout",
    "Manifest",
    "MeshSpec",
    "NodeInfo",
    "Note",
    "ParallelGraph",
    "ParameterSpec",
    "ParseError",
    "Pass",
    "PassError",
    "PassManager",
    "PassRecord",
    "Phase",
    "RegionNodes",
    "RegionSpec",
    "Role",
    "find_regions",
    "alias_root",
    "alias_sources",
    "aliases_of",
    "bind_groups",
    "check_contracts",
    "copy_info",
    "format_records",
    "graph_difference",
    "graph_equal",
    "info_of",
    "is_backward",
    "is_collective",
    "is_effect",
    "is_mutation",
    "parse_graph",
    "parse_pipeline",
    "print_graph",
    "print_pipeline",
    "role_of",
    "set_info",
    "split",
    "target_name",
]
