"""`transform`: the pipeline, read from top to bottom.

check what the user gave -> find experts -> lay out and shard parameters -> [at the first call of each kind:]
capture -> passes, each verified -> split -> emit
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.capture import (
    READINGS,
    STATIC,
    Experts,
    Inputs,
    Key,
    Sizes,
    Stacking,
    Trace,
    build_graph,
    find_experts,
    outside_modes,
    placeholder_names,
    stack_experts,
    top_k_of,
    trace_joint,
)
from ep_fx.config import (
    NpuOptions,
    Options,
    Plan,
    Target,
    check_degrees,
    check_examples,
    check_parameters,
    check_passes,
    check_plan,
    mesh_sizes,
    with_policies,
)
from ep_fx.graph import Layout, Manifest, MeshSpec, ParallelGraph, ParameterSpec, Pass, PassManager, split
from ep_fx.graph.fingerprint import collective_lines, parameter_lines
from ep_fx.graph.pipeline import print_pipeline
from ep_fx.passes import default_pipeline, pipeline_of
from ep_fx.runtime import EPModule, Program
from ep_fx.sharding import agree, find_units, make_layout, mesh_spec, shard_parameter, stages_to_join, stages_together
from ep_fx.targets import capture_device, capture_modes, emit, keeps_attention, lower
from ep_fx.targets.npu.machine import require_npu
from ep_fx.targets.npu.probe import probe
from ep_fx.verify import Report, verify
from ep_fx.verify.computation import computation

_CAPTURE = threading.RLock()
"""Held during a capture, which enters the experts in transformers' registry for its time: one at a time."""

_CONSUMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose weights a transform has taken."""


def transform(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    plan: Plan | None = None,
    reshard_after_forward: bool = True,
    expert_reshard: Literal["strict", "early"] = "strict",
    units: Sequence[str] | None = None,
    grad_reduce: Literal["mean", "sum"] = "mean",
    pipeline: str | Sequence[Pass] | None = None,
    dynamic: bool = True,
    verify: bool = True,
    target: Target | NpuOptions | None = None,
) -> EPModule:
    """Turns an unmodified MoE model into a sharded, verified, trainable module.

    All ranks of `mesh` must call it, with the same weights; in a pipeline every stage does, with its own module. The
    model is consumed: its parameters move to the meta device and its full weights are freed as soon as nobody else
    holds them.

    Args:
        model: any `nn.Module`; its parameters may be on the meta device.
        mesh: dimensions a subset of ``replicate, fsdp, ep, tp`` in this order; for a pipeline stage the submesh of the
            stage, ``mesh["fsdp", "ep"]``. Each rank along the first three has tokens of its own. Ranks along ``tp``
            must get the same tokens, and draw the same random numbers: seed them alike, and differently from others.
        example_inputs, example_kwargs: capture now, for the structure of these inputs; else at the first forward.
        plan: module-path pattern (fnmatch) to a style, `ExpertParallel()`, `TensorParallel()` or
            `ExpertTensorParallel()`; None: the last for all experts that are recognised, at least one when ``ep`` or
            ``tp`` > 1; ``{}``: none, on purpose. What no style splits over ``tp`` is the same on all its ranks.
        reshard_after_forward: free gathered parameters after forward and gather them again in backward.
        expert_reshard: "strict": experts stay gathered from before dispatch to after combine; "early": to last use.
        units: module-path patterns of the FSDP units; None: each block of the longest ModuleList, its experts apart,
            and the rest.
        grad_reduce: "mean": gradients of the mean over data ranks of each rank's loss; "sum": of their sum.
        pipeline: the passes, as text (``"dead-code,expert-parallel,fsdp{reshard=early}"``) or as a sequence; None: the
            default. Its options fix the policies above, where these were not given.
        dynamic: batch and sequence sizes are free; False: one capture for each set of sizes.
        verify: run the rule table after every pass.
        target: device to emit for; None: that of the mesh. A module for another device than its mesh's can be looked
            at, ``module.lowered`` included, but does not run. `ep_fx.NpuOptions` is "npu" with more to say.

    Returns:
        The module: same forward, same parameter names, DTensor parameters, ordinary ``backward()``. The parameters of
            experts in a ModuleList are stacked under one name without the number, ``experts.3.w1 -> experts.w1``;
            ``load_state_dict`` takes the model's own state, and ``full_state_dict()`` gives it back.

    Raises:
        TypeError, ValueError: what was given cannot work; the message names the parameter, mesh dimension or module
            path and what would be accepted. Raised on every rank, before any process group is made.
        PassError: a pass broke a rule.
        RuntimeError: on an npu mesh, torch_npu cannot be loaded, or rows of a first, small exchange over ``ep`` did
            not arrive.
    """
    if getattr(mesh, "device_type", None) == "npu":
        require_npu()
    sizes = mesh_sizes(mesh)
    with ExitStack() as undo:
        with stages_together(stages_to_join(mesh, sizes)):
            try:
                passes = default_pipeline(sizes.get("tp", 1) > 1) if pipeline is None else pipeline_of(pipeline)
                options = Options(
                    plan, reshard_after_forward, expert_reshard, units, grad_reduce, dynamic, verify, target
                )
                options = with_policies(options, passes)
                check_examples(example_inputs, example_kwargs)
                check_plan(plan, sizes)
                planned = _plan(model, sizes, options, passes)
            except (TypeError, ValueError) as error:  # a rank that alone has it must not leave the others waiting
                agree(mesh, "models", [f"{type(error).__name__}: {error}"])
                raise
            undo.callback(planned.stacking.undo)
            now = example_inputs is not None or example_kwargs is not None
            capture = f"example inputs are {'given: capture now' if now else 'not given: capture at the first forward'}"
            agree(
                mesh,
                "models",
                [*planned.lines(), f"pipeline {print_pipeline(passes)}", f"options {options}", capture],
            )
        undo.pop_all()
    _CONSUMED.add(model)
    device, spec = mesh.device_type, mesh_spec(mesh, sizes)
    if device == "npu" and sizes.get("ep", 1) > 1:
        probe(spec.exchange_group, device, lambda line: agree(mesh, "token exchanges", [line]))
    emitted_for = "npu" if isinstance(target, NpuOptions) else target or device
    compiler = _Compiler(model, device, emitted_for, planned, spec, options, passes)
    module = EPModule(
        model, _shard(planned, mesh), planned.layouts, planned.stacking.stacks, mesh, compiler, compiler.target
    )
    if now:
        try:
            module.prepare(*(example_inputs or ()), **(example_kwargs or {}))
        except Exception as error:
            agree(mesh, "captures", [f"{type(error).__name__}: {error}"])
            raise
        agree(mesh, "captures", collective_lines(module.graph))
    return module


@dataclass(frozen=True)
class _Plan:
    """What is decided before a process group is made: experts, the layout of each parameter, its unit."""

    model: nn.Module
    stacking: Stacking
    experts: list[Experts]
    layouts: dict[str, Layout]
    units: dict[str, str]

    def parameters(self) -> list[ParameterSpec]:
        """All parameters as they stand now."""
        named = dict(self.model.named_parameters())
        return [
            ParameterSpec(name, placeholder, p.dtype, p.requires_grad, self.layouts[name], self.units[name])
            for (name, p), placeholder in zip(named.items(), placeholder_names("param", named), strict=True)
        ]

    def lines(self) -> list[str]:
        """What all ranks must agree on."""
        buffers = [f"buffer {name}: {b.dtype} {list(b.shape)}" for name, b in self.model.named_buffers()]
        experts = [f"experts {e.path}: {e.num_experts} over {e.ep} x {e.tp} ranks" for e in self.experts]
        return [*parameter_lines(self.parameters()), *buffers, *experts]


def _plan(model: nn.Module, sizes: dict[str, int], options: Options, passes: Sequence[Pass]) -> _Plan:
    ep = sizes.get("ep", 1)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if model in _CONSUMED:
        raise ValueError(
            f"this {type(model).__name__} was transformed before, which consumed it: its weights live in the first "
            "module; make the model anew"
        )
    check_parameters(model)
    stacking = stack_experts(model)
    try:
        dims = None if options.plan is None else {pattern: s.mesh_dims for pattern, s in options.plan.items()}
        experts = find_experts(model, dims, sizes, stacking.reasons)
        for item in experts:
            check_degrees(item.path, item.num_experts, top_k_of(model, item), item.ep)
        check_passes(passes, sizes, any(e.ep > 1 for e in experts), any(e.tp > 1 for e in experts))
        units = find_units(model, [e.path for e in experts if e.ep > 1 or ep == 1], options.units)
    except (TypeError, ValueError):
        stacking.undo()
        raise
    return _Plan(model, stacking, experts, _layouts(model, experts, sizes), units)


def _layouts(model: nn.Module, experts: Sequence[Experts], sizes: dict[str, int]) -> dict[str, Layout]:
    split_over_ep = {name for item in experts if item.ep > 1 or sizes.get("ep", 1) == 1 for name in item.parameters}
    cuts = {name: cut for item in experts for name, cut in item.cuts.items()}
    layouts = {}
    for name, p in model.named_parameters():
        cut = cuts.get(name)
        over_tp = (None, 1) if cut is None else (cut.dim, cut.blocks)
        layouts[name] = make_layout(tuple(p.shape), name in split_over_ep, sizes, *over_tp)
    return layouts


def _shard(plan: _Plan, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """Sharded parameter under every name; the model's own parameters move to meta one by one, so that the full weights
    are freed as we go."""
    model, layouts, stacks = plan.model, plan.layouts, plan.stacking.stacks
    plan.stacking.replaced.clear()
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    sharded: dict[str, nn.Parameter] = {}
    for parameter in list(names):
        aliases = names.pop(parameter)
        if aliases[0] in stacks:
            parameter = nn.Parameter(stacks[aliases[0]].take(), requires_grad=parameter.requires_grad)
        twin = shard_parameter(parameter, layouts[aliases[0]], mesh)
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for name in aliases:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = empty
            sharded[name] = twin
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[leaf] = buffer.to(mesh.device_type)
    return sharded


@dataclass(frozen=True)
class _Compiler:
    """From one call's inputs to a program; holds everything that is the same for all programs of a module."""

    model: nn.Module
    device: str
    target: str
    plan: _Plan
    mesh: MeshSpec
    options: Options
    passes: tuple[Pass, ...]

    def __call__(self, inputs: Inputs, gradients: bool, sizes: Sizes) -> Program:
        with _CAPTURE, outside_modes(), capture_modes(self.target, self.device):
            return self._compile(inputs, gradients, sizes)

    def _compile(self, inputs: Inputs, gradients: bool, sizes: Sizes) -> Program:
        trace, graph = self._capture(inputs, gradients, sizes)
        graph.manifest = replace(graph.manifest, computation=computation(graph))
        check = _verified if self.options.verify else None
        if check is not None:
            check(graph)
        elif any(e.tp > 1 for e in self.plan.experts):  # what a body does with a part of its features, nobody else asks
            verify(graph, ["partial"]).raise_if_broken()
        manager = PassManager(self.passes, check)
        manager.run(graph)
        if check is not None:  # once for all passes: fake propagation costs up to 1 ms a node
            verify(graph, ["types"]).raise_if_broken()
        npu = self.options.target if isinstance(self.options.target, NpuOptions) else None
        lowered = lower(graph, self.target, npu, verify=self.options.verify)
        return _program(graph, lowered, trace, manager, self.device)

    def _capture(self, inputs: Inputs, gradients: bool, sizes: Sizes) -> tuple[Trace, ParallelGraph]:
        """The trace and the graph by the most dynamic reading of the inputs with which the model can be captured.

        Any error may be due to the reading: torch's own, or the model's at sizes that seem to differ or to be small.
        Where no reading works the first error is raised.
        """
        shapes = {name: layout.full_shape for name, layout in self.plan.layouts.items()}
        parameters = self.plan.parameters()
        buffers = [name for name, _ in self.model.named_buffers()]
        experts, device, first = self.plan.experts, capture_device(self.target), None
        for key, real in self._readings(sizes):
            try:
                trace = trace_joint(
                    self.model, shapes, device, experts, inputs, key, gradients=gradients, real_sizes=real,
                    whole_attention=keeps_attention(self.target),
                )
                return trace, build_graph(trace, parameters, buffers, experts, self._manifest())
            except Exception as error:
                first = first or error
        assert first is not None
        raise first

    def _manifest(self) -> Manifest:
        """What is known before a trace."""
        return Manifest(
            self.mesh,
            (),
            (),
            (),
            (),
            0,
            (),
            grad_reduce=self.options.grad_reduce,
            reshard_after_forward=self.options.reshard_after_forward,
            expert_reshard=self.options.expert_reshard,
        )

    def _readings(self, sizes: Sizes) -> list[tuple[Key, bool]]:
        """How to read the inputs' dimensions, and whether their real sizes are the hints, in the order to try."""
        if sizes is Sizes.FIXED or not self.options.dynamic:
            return [(STATIC, True)]
        free = [key for key in READINGS if key is not STATIC]
        hints = (True,) if sizes is Sizes.REAL else (False, True)
        return [*((key, real) for real in hints for key in free), (STATIC, True)]


def _verified(graph: ParallelGraph) -> Report:
    return verify(graph).raise_if_broken()


def _program(
    graph: ParallelGraph, lowered: ParallelGraph, trace: Trace, manager: PassManager, device: str
) -> Program:
    halves = split(lowered)
    constants = {name: value.to(device) for name, value in graph.constants.items()}
    manifest = graph.manifest
    order = [
        *(p.placeholder for p in manifest.parameters),
        *(b.placeholder for b in manifest.buffers),
        *manifest.inputs,
        *manifest.tangents,
    ]
    return Program(
        graph=graph,
        lowered=lowered,
        forward=emit(halves.forward, constants),
        backward=None if halves.backward is None else emit(halves.backward, constants),
        backward_inputs=tuple(order.index(name) for name in halves.placeholders),
        violation=trace.guards.violation,
        out_spec=trace.out_spec,
        out_leaves=tuple(trace.out_leaves),
        tensor_leaves=tuple(trace.tensor_leaves),
        records=tuple(manager.records),
        history=manager.history,
        wider_gradients=_wider_gradients(lowered),
    )


def _wider_gradients(lowered: ParallelGraph) -> dict[str, torch.dtype]:
    """Dtype of each gradient that is not in that of its parameter."""
    groups: Any = lowered.output.args[0]
    found = {}
    for spec, node in zip(lowered.manifest.trainable, groups[1], strict=False):  # forward alone has no gradients
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if value is not None and value.dtype is not spec.dtype:
            found[spec.name] = value.dtype
    return found
