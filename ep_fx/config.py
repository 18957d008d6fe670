"""Options of `transform`, and the checks of what the user gave: every error before any process group is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ep_fx.graph import DATA_DIMS, MESH_DIMS, Pass, check_contracts, print_pipeline
from ep_fx.styles import ExpertParallel, ExpertTensorParallel, Style, TensorParallel, applied_style

Plan = Mapping[str, Style]
_STYLES = (ExpertParallel, TensorParallel, ExpertTensorParallel)


@dataclass(frozen=True)
class NpuOptions:
    """The NPU as target of `transform`, with what is off by default: ``target=ep_fx.NpuOptions(soc="A3", ...)``.

    Args:
        soc: the series of the chips, Atlas ``"A2"`` or ``"A3"``.
        fused_exchange: exchange and grouped product as one kernel, ``npu_alltoallv_gmm`` and ``npu_gmm_alltoallv``,
            where its conditions hold (A3, half precision, ep 8 to 128). It overlaps the two by itself, and nothing of
            the graph runs between an exchange and its wait. Each rank must have 2 MiB of rows in every step, which
            depends on the routing and is not checked: for large and balanced batches.
        main_grads_fp32: gradients of experts' weights in half precision are computed, reduced, returned and added up
            over micro-batches in fp32 (``npu_grouped_matmul_add_`` into zeros). ``parameter.grad`` is fp32 then: for an
            optimizer with weights of its own in fp32. Twice the bytes in the reduction.
    """

    soc: Literal["A2", "A3"] = "A2"
    fused_exchange: bool = False
    main_grads_fp32: bool = False

    def __post_init__(self) -> None:
        if self.soc not in ("A2", "A3"):
            raise ValueError(f"NpuOptions.soc must be 'A2' or 'A3', got {self.soc!r}")
        for name in ("fused_exchange", "main_grads_fp32"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"NpuOptions.{name} must be True or False, got {getattr(self, name)!r}")
        if self.fused_exchange and self.soc != "A3":
            raise ValueError(
                f"NpuOptions.fused_exchange needs soc='A3', got {self.soc!r}, which has no npu_alltoallv_gmm; leave it "
                "out"
            )


Target = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True)
class Options:
    """Keyword options of `transform`; see there for their meaning."""

    plan: Plan | None = None
    reshard_after_forward: bool = True
    expert_reshard: Literal["strict", "early"] = "strict"
    units: Sequence[str] | None = None
    grad_reduce: Literal["mean", "sum"] = "mean"
    dynamic: bool = True
    verify: bool = True
    target: Target | NpuOptions | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.target, NpuOptions) and self.target not in (None, "cpu", "cuda", "npu"):
            raise ValueError(
                "target must be 'cpu', 'cuda', 'npu', ep_fx.NpuOptions(...) or None (the mesh's device), got "
                f"{self.target!r}"
            )
        if self.expert_reshard not in ("strict", "early"):
            raise ValueError(f"expert_reshard must be 'strict' or 'early', got {self.expert_reshard!r}")
        if self.grad_reduce not in ("mean", "sum"):
            raise ValueError(f"grad_reduce must be 'mean' or 'sum', got {self.grad_reduce!r}")
        for name in ("reshard_after_forward", "dynamic", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.units, str):
            raise TypeError(f"units must be a sequence of module-path patterns, got the string {self.units!r}")
        if self.plan is not None and not isinstance(self.plan, Mapping):
            raise TypeError(f"plan must map module-path patterns to styles, ep_fx.ExpertParallel(), got {self.plan!r}")
        for pattern, style in (self.plan or {}).items():
            if not isinstance(style, _STYLES):
                accepted = ", ".join(f"ep_fx.{cls.__name__}()" for cls in _STYLES)
                raise TypeError(f"plan[{pattern!r}] must be one of {accepted}, got {style!r}")


def with_policies(options: Options, passes: Sequence[Pass]) -> Options:
    """`options` with the policies that `passes` ask for.

    Raises:
        ValueError: a pass asks for another value than the one passed to `transform`.
    """
    defaults = {field.name: field.default for field in fields(options)}
    for step in passes:
        for policy, value in step.policies.items():
            if policy not in defaults:
                raise ValueError(f"pass {str(step)!r} asks for {policy} {value!r}, for which transform has no option")
            given = getattr(options, policy)
            if given not in (value, defaults[policy]):
                raise ValueError(
                    f"pass {str(step)!r} asks for {policy} {value!r}, but {given!r} was given; say it in one place"
                )
            options = replace(options, **{policy: value})
    return options


def check_passes(passes: Sequence[Pass], sizes: Mapping[str, int], split_experts: bool, cut_experts: bool) -> None:
    """Checks that a pipeline can run, and that it does what the mesh asks for.

    Args:
        split_experts: whether some experts are split over ``ep``.
        cut_experts: whether some experts are cut over ``tp``.

    Raises:
        ContractError: a pass lacks what it requires, or provides what holds already.
        ValueError: nothing in the pipeline shards the parameters, or lowers the exchange.
    """
    facts = check_contracts(passes)
    ranks = math.prod(sizes.get(dim, 1) for dim in DATA_DIMS)
    needed = {"expert-parallel": "lowers the token exchange"} if split_experts else {}
    if cut_experts:
        needed["tensor-parallel"] = "sums the partial outputs of experts"
    if ranks > 1:
        needed["fsdp"] = "shards the parameters and reduces the gradients"
    for fact, what in needed.items():
        if fact not in facts:
            raise ValueError(
                f"pipeline {print_pipeline(passes)!r} lacks {fact!r}, which {what} on this mesh of {dict(sizes)}"
            )


def mesh_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Size of each named dimension of `mesh`, after checking that ep_fx can use it.

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: dimensions without names, unknown names, another order than ``replicate, fsdp, ep, tp``,
            a device type that has no backend here, or a mesh without this rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"the mesh of shape {tuple(mesh.shape)} has no dimension names; give "
            f"mesh_dim_names=..., a subset of {MESH_DIMS} in this order"
        )
    unknown = [name for name in names if name not in MESH_DIMS]
    if unknown == ["pp"]:
        stage = ", ".join(repr(name) for name in names if name != "pp")
        raise ValueError(
            f"mesh dimension 'pp' of {names} is a pipeline's, which transform does not cut; give it the module of this "
            f"rank's stage and the submesh of that stage, mesh[{stage}]"
        )
    if unknown:
        raise ValueError(f"mesh dimensions {unknown} of {names} are unknown; accepted: {MESH_DIMS}")
    if list(names) != [name for name in MESH_DIMS if name in names]:
        raise ValueError(f"mesh dimensions {names} must stand in the order {MESH_DIMS}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; only ranks of the mesh may call transform, and of the "
            f"{dist.get_world_size()} ranks that run the mesh holds {mesh.size()}"
        )
    sizes = {name: mesh.size(index) for index, name in enumerate(names)}
    _check_device(mesh.device_type)
    return sizes


def _check_device(device_type: str) -> None:
    if device_type == "cpu":
        return
    try:
        available = bool(torch.get_device_module(device_type).is_available())
    except RuntimeError as error:
        raise ValueError(f"mesh device type {device_type!r} has no backend in this process: {error}") from error
    if not available:
        raise ValueError(f"mesh device type {device_type!r} is not available on this machine; accepted here: 'cpu'")


def check_degrees(path: str, num_experts: int, top_k: int | None, ep: int) -> None:
    """Checks one MoE region against the mesh.

    Raises:
        ValueError: `num_experts` cannot be divided over `ep` ranks, or `top_k` is larger than `num_experts`.
    """
    if num_experts % ep:
        raise ValueError(
            f"{path}: num_experts {num_experts} is not divisible by the mesh dimension 'ep' of size {ep}; "
            f"accepted ep sizes: {[d for d in range(1, num_experts + 1) if num_experts % d == 0]}"
        )
    if top_k is not None and top_k > num_experts:
        raise ValueError(f"{path}: top_k {top_k} is larger than num_experts {num_experts}")


def check_plan(plan: Plan | None, sizes: Mapping[str, int]) -> None:
    """Checks that what the plan splits has a mesh dimension to be split over.

    Raises:
        ValueError: a style that splits over a dimension which the mesh lacks.
    """
    for pattern, style in (plan or {}).items():
        for dim in style.mesh_dims:
            if dim not in sizes:
                raise ValueError(
                    f"plan[{pattern!r}] is {style}, which splits experts over the mesh dimension {dim!r}, but the mesh "
                    f"has only {list(sizes)}; add {dim!r} (size 1 will do), or leave plan out"
                )


def check_examples(inputs: object, kwargs: object) -> None:
    """Checks the form of example inputs.

    Raises:
        TypeError: not a tuple of positional arguments, or not a dict of keyword arguments.
    """
    if inputs is not None and not isinstance(inputs, tuple):
        got = type(inputs).__name__
        raise TypeError(f"example_inputs must be a tuple of positional arguments, e.g. (ids,), got {got}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"example_kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}")


def check_parameters(model: nn.Module) -> None:
    """Checks that nobody has made `model` parallel before: `transform` takes the plain model.

    Raises:
        ValueError: a style was applied, `fully_shard` was, or a parameter is a DTensor for another reason. With both of
            them the message is the same, in whatever order they were applied.
    """
    if (found := applied_style(model)) is not None:
        path, style = found
        raise ValueError(
            f"{style} was applied to the experts {path!r}; transform splits the experts of the plain model itself: "
            f"make the model anew, leave apply and fully_shard out, and pass plan={{{path!r}: {style}}}, or no plan to "
            "split all experts"
        )
    units = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
    if units:
        raise ValueError(
            f"fully_shard was applied to {len(units)} modules, first {units[0]!r}; transform shards the plain model "
            "itself over the mesh dimension 'fsdp': make the model anew, leave fully_shard out, and name its modules "
            "in units=[...] if the default units are not wanted"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor {parameter.placements} already, which another parallelism made; "
                "transform takes the plain model and shards it itself"
            )
