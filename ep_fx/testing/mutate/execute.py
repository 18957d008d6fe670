"""What a rank does with a graph: two micro-batches in flight, everything noted that a reader of the graph might miss.

    forward 0, forward 1, backward 0, backward 1

Noted at the dispatcher: collectives, frees, waits, reads of what is still in flight, and bytes of unsharded parameters
at every operator. Nothing here reads a rule, a label or a Manifest's opinion of the graph.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.graph import Manifest, MeshSpec
from ep_fx.sharding import local_shard, mesh_spec
from ep_fx.targets import Boxed, emit
from ep_fx.testing.collective_log import CollectiveLog, Event
from ep_fx.testing.mutate.wire import Wire, from_wire
from ep_fx.testing.ranks import local_mesh

_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class Setting:
    """What all runs of one subject share; see `Subject`."""

    manifest: Manifest
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    batches: tuple[tuple[tuple[Tensor, ...], ...], ...]


@dataclass(frozen=True)
class Code:
    """The two halves of a graph, as data, and what they need."""

    forward: Wire
    backward: Wire
    backward_inputs: tuple[int, ...]
    constants: Mapping[str, Tensor]


@dataclass
class Outcome:
    """What happened on one rank.

    Args:
        values: by what they are: outputs, gradients, buffers, of every micro-batch.
        events: collectives and operators of the dialect, in order; groups by what they span.
        saved_bytes: kept from forward to backward, for each micro-batch.
        live_bytes: unsharded bytes after each half of each micro-batch.
        byte_time: unsharded bytes, summed over all torch operators.
        peak_bytes: the most unsharded bytes.
        operators: how often each torch operator ran.
        waits: collectives that were waited for.
        early: operators that read the result of a collective before its wait.
        error: what was raised, None where all went well.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    byte_time: int = 0
    peak_bytes: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    early: list[str] = field(default_factory=list)
    error: str | None = None


class Recorder(CollectiveLog):
    """A log that also counts operators, waits, and reads of results that are still in flight."""

    def __init__(self) -> None:
        super().__init__(dialect=True)
        self.operators: Counter[str] = Counter()
        self.byte_time = 0
        self.waits = 0
        self.early: list[str] = []
        self._flying: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == _WAIT:
            self.waits += 1
            self._flying.pop(_storage(args[0]), None)
        elif self._flying and (func.namespace != "ep_fx" or name == "ep_fx::reshard"):
            self.early += [name for t in _tensors((args, kwargs or {})) if _storage(t) in self._flying]
        if func.namespace not in ("ep_fx", "_c10d_functional"):
            self.operators[name] += 1
            self.byte_time += self.live_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "_c10d_functional" and name != _WAIT:
            self._flying.update((_storage(t), t) for t in _tensors(result))
        return result


def execute(rank: int, path: str, codes: list[Code]) -> Outcome:
    """Runs this rank's code on the subject in the file `path`; an exception is part of the outcome."""
    setting = _setting(path)
    mesh = local_mesh(**setting.manifest.mesh.sizes)
    here = _spec(mesh)
    outcome = Outcome()
    with Recorder() as log, torch.no_grad():
        try:
            _run(rank, setting, codes[rank], mesh, outcome, log, _names(setting.manifest.mesh, here))
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    labels = _labels(here)
    outcome.events = [replace(e, group=labels.get(e.group or "", e.group)) for e in log.events]
    outcome.byte_time, outcome.peak_bytes, outcome.operators = log.byte_time, log.peak_bytes, log.operators
    outcome.waits, outcome.early = log.waits, log.early
    return outcome


def _run(
    rank: int, setting: Setting, code: Code, mesh: DeviceMesh, outcome: Outcome, log: Recorder, names: Mapping[str, str]
) -> None:
    manifest = setting.manifest
    constants = {name: value.clone() for name, value in code.constants.items()}
    forward, backward = (_emit(wire, names, constants) for wire in (code.forward, code.backward))
    shards = [local_shard(p, s.layout, mesh) for p, s in zip(setting.parameters, manifest.parameters, strict=True)]
    buffers = [b.clone() for b in setting.buffers]
    log.operators.clear()
    calls = []
    for index, batches in enumerate(setting.batches):
        values = [*shards, *buffers, *(x.clone() for x in batches[rank])]
        outputs, saved = forward(list(values))
        _note(outcome, f"output of micro-batch {index}", outputs)
        outcome.saved_bytes.append(sum(_distinct_bytes(saved)))
        outcome.live_bytes.append(log.live_bytes)
        tangents = [_tangent(outputs[i], index) for i in manifest.differentiable]
        calls.append((list(saved), [*values, *tangents]))
        del outputs, saved, values, tangents
    for index in range(len(calls)):
        saved, pool = calls[index]
        calls[index] = ([], [])
        arguments = [*saved, *(pool[i] for i in code.backward_inputs)]
        del saved, pool
        gradients, inputs = backward(arguments)
        due = [p.name for p in manifest.trainable]
        for name, gradient in zip(due, gradients, strict=True):
            _note(outcome, f"gradient of {name} of micro-batch {index}", [gradient])
        _note(outcome, f"input gradient of micro-batch {index}", inputs)
        del gradients, inputs
        outcome.live_bytes.append(log.live_bytes)
    _note(outcome, "buffer", buffers)
    _note(outcome, "shard", shards)


def _note(outcome: Outcome, what: str, values: Any) -> None:
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            outcome.values[f"{what} [{index}]"] = value.detach().clone()


def _tangent(output: Tensor, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def _distinct_bytes(values: Any) -> list[int]:
    storages = {_storage(t): t.untyped_storage().nbytes() for t in _tensors(values)}
    return list(storages.values())


@functools.lru_cache(maxsize=32)
def _setting(path: str) -> Setting:
    loaded = torch.load(path, weights_only=False)
    assert isinstance(loaded, Setting)
    return loaded


def _emit(wire: Wire, names: Mapping[str, str], constants: Mapping[str, Tensor]) -> Boxed:
    graph: fx.Graph = from_wire(wire, names)
    return emit(graph, constants)


@functools.cache
def _spec(mesh: DeviceMesh) -> MeshSpec:
    names = mesh.mesh_dim_names or ()
    return mesh_spec(mesh, dict(zip(names, mesh.shape, strict=True)))


def _names(theirs: MeshSpec, ours: MeshSpec) -> dict[str, str]:
    found = {name: ours.groups[dims] for dims, name in theirs.groups.items()}
    return {**found, theirs.exchange: ours.exchange} if theirs.exchange else found


def _labels(spec: MeshSpec) -> dict[str, str]:
    found = {name: " x ".join(dims) for dims, name in spec.groups.items()}
    return {**found, spec.exchange: "exchange"} if spec.exchange else found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []
