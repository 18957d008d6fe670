"""`EPModule`: what `transform` returns, an ordinary `nn.Module` with the model's names.

Parameters are DTensors on the user's mesh under their original names, those of a list of experts as one stack under the
name of the list (``experts.3.w1 -> experts.w1``); buffers stand under theirs; forward takes the model's arguments and
returns its output class. Train, eval and no-grad are captured apart, at their first call.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ep_fx.capture import Inputs, Sizes, Stack, fold, refuse_caches, unfold
from ep_fx.graph import Layout, ParallelGraph, format_records, print_graph
from ep_fx.graph.summary import format_summary, summarise
from ep_fx.runtime.program import Call, Program, run
from ep_fx.sharding import as_dtensor, cut_over_tp, is_packed, local_shard, whole_over_tp
from ep_fx.verify import Report, verify
from ep_fx.verify.reduction_table import format_reductions, reduction_table

Compile = Callable[[Inputs, bool, Sizes], Program]
_MAX_CAPTURES = 8
_MANY_CAPTURES = 16


class EPModule(nn.Module):
    """A transformed model.

    Args:
        template: the model, its parameters on the meta device; captured again for each new mode and input structure.
        parameters: sharded parameter of each name, under every name it has in the model.
        layouts: layout of each parameter, by its first name.
        stacks: parameters that stand for those of the experts in a list, by name.
        mesh: the user's mesh.
        compile_program: from inputs, whether gradients are due, and whether to hint real sizes, to a program.
        target: device that the programs are emitted for.
    """

    _template: nn.Module
    _layouts: dict[str, Layout]
    _stacks: dict[str, Stack]
    _mesh: DeviceMesh
    _compile: Compile
    _target: str
    _is_fake: bool
    _programs: dict[Hashable, list[Program]]
    _lock: threading.RLock
    _names: list[str]
    _dtypes: dict[str, torch.dtype]
    _twins: list[tuple[nn.Module, nn.Module]]

    def __init__(
        self,
        template: nn.Module,
        parameters: dict[str, nn.Parameter],
        layouts: dict[str, Layout],
        stacks: dict[str, Stack],
        mesh: DeviceMesh,
        compile_program: Compile,
        target: str,
    ) -> None:
        super().__init__()
        self._mirror(template, parameters)
        hidden = {
            "_template": template,
            "_layouts": layouts,
            "_stacks": stacks,
            "_mesh": mesh,
            "_compile": compile_program,
            "_target": target,
            "_is_fake": dist.get_backend(mesh.get_group(0)) == "fake",
            "_programs": {},
            "_lock": threading.RLock(),
            "_names": list(layouts),
            "_dtypes": {name: parameters[name].dtype for name in layouts},
            "_twins": [(self.get_submodule(path), module) for path, module in template.named_modules()],
        }
        for name, value in hidden.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "forward", _with_signature(self.forward, template))
        self.register_load_state_dict_pre_hook(_shard_full_tensors)  # type: ignore[no-untyped-call]
        if any(is_packed(layout, mesh) for layout in layouts.values()):
            self.register_state_dict_post_hook(_unpack)  # type: ignore[no-untyped-call]

    def _mirror(self, template: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        """The template's module tree, with the sharded parameters and the template's own buffers."""
        for path, module in template.named_modules(remove_duplicate=False):
            twin: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in twin._modules:
                    twin.add_module(part, nn.Module())
                twin = cast(nn.Module, twin._modules[part])
            twin.training = module.training
            for leaf in module._parameters:
                full = f"{path}.{leaf}" if path else leaf
                twin.register_parameter(leaf, parameters.get(full))
            for leaf, buffer in module._buffers.items():
                twin.register_buffer(leaf, buffer, persistent=leaf not in module._non_persistent_buffers_set)

    # -- running ---------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises:
            ValueError: a tensor on another device than the mesh's, a generation cache asked for, input sizes that the
                model cannot be captured for, or a mesh whose ranks are fake.
        """
        refuse_caches(kwargs)
        inputs = Inputs.of(args, kwargs)
        if self._target != self._mesh.device_type:
            raise ValueError(
                f"this module was emitted for {self._target!r}, its mesh is on {self._mesh.device_type!r}: it can be "
                "looked at, not run; leave target out, or give a mesh on that device"
            )
        if self._is_fake:
            raise ValueError(
                "this module's mesh is fake (ep_fake_mesh, backend 'fake'): its ranks never communicate, so nothing "
                "can run on it; module.prepare(...) captures for these inputs, and module.graph can be read; to run, "
                "give transform a mesh of real ranks (ep_ranks)"
            )
        self._check_devices(inputs)
        parameters = self._ordered()
        self._check_parameters(parameters)
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (*parameters, *inputs.tensors))
        program = self._program(inputs, gradients)
        buffers = dict(self.named_buffers())
        with torch.no_grad():
            local = [cast(DTensor, p).to_local() for p in parameters]
            read = [buffers[b.name] for b in program.graph.manifest.buffers]
            given = (x.detach().contiguous() for x in inputs.tensors)  # captured as such: views depend on strides
            values = (*local, *read, *given)
        holders = (*parameters, *read, *inputs.tensors)
        return run(program, Call(values, holders, self._rewrap, self._lock), parameters, inputs.tensors)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Captures for the structure of these inputs now, without running: parameters may be on the meta device, and
        nothing of the inputs is read but their types and sizes. Raises what forward would."""
        refuse_caches(kwargs)
        inputs = Inputs.of(args, kwargs)
        self._check_devices(inputs)
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (*self.parameters(), *inputs.tensors))
        self._program(inputs, gradients)

    def _ordered(self) -> list[nn.Parameter]:
        """The parameters in the order of the graph's placeholders."""
        found = dict(self.named_parameters())
        return [found[name] for name in self._names]

    def _check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Whether a graph can run on `parameters`; a capture needs no weights."""
        for name, parameter in zip(self._names, parameters, strict=True):
            dtype = self._dtypes[name]
            if parameter.dtype is not dtype or parameter.device.type != self._mesh.device_type:
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype} on {parameter.device}, the graph was made for "
                    f"{dtype} on {self._mesh.device_type!r}; convert the model before ep_fx.transform, and after a "
                    "transform from the meta device call to_empty(device=...) and load the state"
                )

    def _rewrap(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        return as_dtensor(gradient, self._layouts[self._names[index]], self._mesh)

    def _layout_of(self, parameter: nn.Parameter) -> Layout:
        return self._layouts[next(name for name, p in self.named_parameters() if p is parameter)]

    def _check_devices(self, inputs: Inputs) -> None:
        for path, tensor in zip(inputs.paths, inputs.tensors, strict=True):
            if tensor.device.type != self._mesh.device_type:
                raise ValueError(
                    f"input {path!r} ({tensor.dtype}, shape {tuple(tensor.shape)}) is on device {tensor.device}, the "
                    f"mesh is on {self._mesh.device_type!r}; move it there first"
                )

    def _program(self, inputs: Inputs, gradients: bool) -> Program:
        """The program for these inputs: a known one whose assumptions hold, else a new capture."""
        with self._lock:
            known = self._programs.setdefault(self._key(inputs, gradients), [])
            broken = [(program, program.violation(inputs.tensors)) for program in known]
            for program, violation in broken:
                if violation is None:
                    return program
            if len(known) >= _MAX_CAPTURES:
                raise ValueError(
                    f"this input structure was captured {len(known)} times and still does not serve these sizes: "
                    f"{broken[-1][1]}"
                )
            self._pass_flags_on()
            for sizes in (Sizes.REAL, Sizes.FIXED) if known else Sizes:
                program = self._compile(inputs, gradients, sizes)
                if program.violation(inputs.tensors) is None:
                    break
            known.append(program)
            for name, dtype in program.wider_gradients.items():
                self.get_parameter(name).grad_dtype = dtype
            if len(self.programs) == _MANY_CAPTURES:
                warnings.warn(
                    f"{_MANY_CAPTURES} captures of one module: numbers among its arguments are part of the graph, so "
                    "pass what changes from call to call as a tensor",
                    stacklevel=2,
                )
            return program

    def _pass_flags_on(self) -> None:
        """The template is traced as the user left this module: its modes, and which parameters are trained."""
        for twin, module in self._twins:
            module.training = twin.training
        for (_, hidden), parameter in zip(self._template.named_parameters(), self._ordered(), strict=True):
            hidden.requires_grad_(parameter.requires_grad)

    def _key(self, inputs: Inputs, gradients: bool) -> Hashable:
        training = tuple(twin.training for twin, _ in self._twins)
        frozen = tuple(p.requires_grad for p in self._ordered()) if gradients else ()
        device = self._mesh.device_type
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        return inputs.structure, training, frozen, gradients, autocast

    def __getstate__(self) -> Any:
        raise TypeError(
            "a transformed module cannot be copied or pickled: it holds process groups and compiled graphs; save its "
            "state_dict(), and transform a new model to load it"
        )

    # -- state -----------------------------------------------------------------------------------------------------
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state as the model had it before `transform`: full tensors under its own names, on every rank's device.

        Experts of a list stand under their own names again, so that the model's class loads it with ``strict=True``.
        Collective: all ranks of the mesh must call it; each full tensor is gathered in turn.
        """
        state = {name: _full(value) for name, value in self.state_dict().items()}
        return self.by_original_names(state)

    def by_original_names(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors by this module's parameter names (weights, gradients) under the names that the model had."""
        return unfold(tensors, self._stacks)

    # -- looking ---------------------------------------------------------------------------------------------------
    @property
    def programs(self) -> list[Program]:
        """Everything captured so far, oldest first."""
        return [program for known in self._programs.values() for program in known]

    @property
    def graph(self) -> ParallelGraph:
        """The graph of the latest program that has a backward, else of the latest one.

        Raises:
            RuntimeError: nothing was captured yet.
        """
        return self._latest().graph

    @property
    def lowered(self) -> ParallelGraph:
        """What runs: `graph` itself, or for a target with a lowering (npu) the lowered copy of it.

        Raises:
            RuntimeError: nothing was captured yet.
        """
        return self._latest().lowered

    def _latest(self) -> Program:
        programs = self.programs
        if not programs:
            raise RuntimeError(
                "nothing is captured yet: run the module once, or pass example_inputs=... to ep_fx.transform"
            )
        joint = [p for p in programs if p.backward is not None]
        return (joint or programs)[-1]

    def print_graph(self) -> str:
        """The graph as stable text, which `ep_fx.graph.parse_graph` reads back."""
        return print_graph(self.graph)

    def visualize(self, path: str | Path, *, layer: str | None = None) -> Path:
        """Writes a picture of the graph; the suffix says which: .html, .svg, .dot, .txt, .md (one layer, mermaid),
        .json (Model Explorer), .graphml (networkx), .perfetto.json (timeline).

        Args:
            layer: for .md, the module path of the block to show; None: the first with experts.

        The page (.html) has three views, structure, schedule and passes, and opens from a file without a network.

        Raises:
            ValueError: another suffix, or no such layer.
            RuntimeError: nothing was captured yet.
        """
        from ep_fx.viz import visualize  # its layout and template libraries are an extra

        program = self._latest()
        return visualize(program.graph, path, layer=layer, records=program.records, history=program.history)

    def verify(self, *, types: bool = False) -> Report:
        """Runs the rule table on the graph again and returns its report; nothing is raised.

        Args:
            types: also propagate fake tensors anew and compare.
        """
        return verify(self.graph, types=types)

    def explain_collectives(self) -> str:
        """The collectives of one step as a table: direction, kind, mesh dimensions, count, bytes a rank."""
        return format_summary(summarise(self.graph))

    def explain_passes(self) -> str:
        """What each pass did to the graph, as a table: time, nodes added, removed and moved."""
        return format_records(self._latest().records)

    def explain_gradients(self) -> str:
        """For each parameter the sums over ranks that its gradient meets, and its divisor, as a markdown table."""
        return format_reductions(reduction_table(self.graph))

    @property
    def config(self) -> Any:
        """The model's config, where it has one."""
        return self._template.config

    def extra_repr(self) -> str:
        """Model class and mesh."""
        sizes = dict(zip(self._mesh.mesh_dim_names or (), self._mesh.shape, strict=True))
        return f"{type(self._template).__name__}, mesh {sizes}"


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _shard_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets ``load_state_dict`` take the original model's full tensors: each rank keeps its shard."""
    assert isinstance(module, EPModule)
    fold(state, module._stacks, prefix)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or value is None:
            continue
        layout = module._layout_of(parameter)
        if isinstance(value, DTensor):
            if is_packed(layout, module._mesh):
                state[prefix + name] = cut_over_tp(value, layout, module._mesh)
            continue
        if tuple(value.shape) != layout.shape:
            continue  # load_state_dict itself reports the wrong shape
        state[prefix + name] = as_dtensor(local_shard(value, layout, module._mesh), layout, module._mesh)


def _unpack(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """In a state dict, parameters of which a rank has no box are whole over ``tp``: a checkpoint writes boxes."""
    assert isinstance(module, EPModule)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, DTensor) and is_packed(module._layout_of(parameter), module._mesh):
            state[prefix + name] = whole_over_tp(cast(DTensor, value.detach()), module._mesh)


def _with_signature(forward: Callable[..., Any], template: nn.Module) -> Callable[..., Any]:
    """`forward` under the signature of the model's own, which trainers and data collators inspect."""

    @functools.wraps(template.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call.__signature__ = inspect.signature(template.forward)  # type: ignore[attr-defined]
    return call
