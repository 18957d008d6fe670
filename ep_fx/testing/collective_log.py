"""What a run really communicated and kept: read at the dispatcher, so neither graph nor labels are believed.

    with CollectiveLog() as log:
        loss = module(ids).logits.sum(); loss.backward()
    log.events      every collective in order: op, group, ranks, shapes, dtype
    log.peak_bytes  most bytes of unsharded parameters that were allocated at once

Collectives inside an ep_fx operator are seen too, with the operator's name in `inside`. A mode belongs to one thread;
autograd on the CPU runs backward in the thread that called it, so the log sees it. `assert_same_sequence` compares
the events of all ranks.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import GroupName
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_DIALECT = "ep_fx"
_COMMUNICATION = frozenset({"_c10d_functional", "c10d_functional", "c10d"})
_NO_COLLECTIVE = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
_ALLOCATES_PARAMETERS = frozenset({"ep_fx::unshard", "ep_fx::assemble"})


@dataclass(frozen=True)
class Event:
    """One operator that ran.

    Args:
        op: ``namespace::name``.
        group: name of its process group, None where it has none.
        ranks: global ranks of that group.
        shapes: shapes of its input tensors.
        dtype: dtype of the first input tensor, None without one.
        inside: the ep_fx operator whose kernel called it.
        storage_bytes: bytes of each argument's storage after an ``ep_fx::reshard``.
        live_bytes: bytes of unsharded parameters that are allocated after it.
    """

    op: str
    group: str | None = None
    ranks: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None
    inside: str | None = None
    storage_bytes: tuple[int, ...] = ()
    live_bytes: int = 0

    @property
    def numel(self) -> int:
        """Number of elements that this rank puts in."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def is_collective(self) -> bool:
        """Whether it communicates itself."""
        return not self.op.startswith(f"{_DIALECT}::")


class CollectiveLog(TorchDispatchMode):
    """Records the collectives that run inside its ``with`` block.

    Args:
        dialect: record every ep_fx operator too, before the collectives inside it.
    """

    def __init__(self, *, dialect: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.peak_bytes = 0
        self._dialect = dialect
        self._inside: str | None = None
        self._parameters: dict[StorageWeakRef, None] = {}

    def of(self, *ops: str) -> list[Event]:
        """The events whose operator is called one of `ops`, without namespace."""
        return [event for event in self.events if event.op.split("::")[1] in ops]

    @property
    def collectives(self) -> list[Event]:
        """The events that communicate."""
        return [event for event in self.events if event.is_collective]

    @property
    def live_bytes(self) -> int:
        """Bytes of unsharded parameters that are allocated now."""
        storages = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._parameters)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = _arguments(func, args, kwargs or {})
        if func.namespace == _DIALECT:
            return self._run_dialect(func, arguments, args, kwargs or {})
        if func.namespace in _COMMUNICATION and func._opname not in _NO_COLLECTIVE:
            self.events.append(_event(func, arguments, inside=self._inside, live_bytes=self.live_bytes))
        return func(*args, **(kwargs or {}))

    def _run_dialect(
        self, func: OpOverload, arguments: dict[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        name = func._schema.name
        position = len(self.events)
        outer, self._inside = self._inside, name
        try:
            with self:  # the kernel's own operators come by here as well
                result = func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        finally:
            self._inside = outer
        if name in _ALLOCATES_PARAMETERS:
            self._parameters.update((StorageWeakRef(t.untyped_storage()), None) for t in _tensors(result))
        live = self.live_bytes
        self.peak_bytes = max(self.peak_bytes, live)
        if self._dialect:
            freed = _tensors(args) if name == "ep_fx::reshard" else ()
            sizes = tuple(tensor.untyped_storage().nbytes() for tensor in freed)
            event = _event(func, arguments, inside=outer, storage_bytes=sizes, live_bytes=live)
            self.events.insert(position, event)
        return result


def assert_same_sequence(logs_by_rank: Sequence[Sequence[Event]]) -> None:
    """Any two ranks agree on every collective of the groups that both belong to: order, op, dtype, and size.

    Only the sizes of all-to-all may differ.

    Raises:
        AssertionError: names the two ranks, the place, and what each of them did there.
    """
    for left, right in itertools.combinations(range(len(logs_by_rank)), 2):
        shared = [
            [event for event in logs_by_rank[rank] if event.is_collective and {left, right} <= set(event.ranks)]
            for rank in (left, right)
        ]
        for place, (mine, theirs) in enumerate(itertools.zip_longest(*shared)):
            if mine is None or theirs is None or _signature(mine) != _signature(theirs):
                raise AssertionError(
                    f"ranks {left} and {right} differ at collective {place} of the groups that both belong to:\n"
                    f"  rank {left}:  {_describe(mine)}\n  rank {right}:  {_describe(theirs)}"
                )


def _signature(event: Event) -> tuple[object, ...]:
    size = None if "alltoall" in event.op.replace("_", "") else event.numel
    return event.group, event.ranks, event.op, event.dtype, size


def _describe(event: Event | None) -> str:
    if event is None:
        return "nothing more"
    shapes = ", ".join(map(str, event.shapes))
    where = f" inside {event.inside}" if event.inside else ""
    return f"{event.op}({shapes}) {event.dtype} on group {event.group!r} of ranks {event.ranks}{where}"


def _event(func: OpOverload, arguments: dict[str, Any], **details: Any) -> Event:
    group = _group(arguments)
    name = None if group is None else group.group_name
    ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
    tensors = tuple(_tensors(_inputs(arguments)))
    dtype = tensors[0].dtype if tensors else None
    return Event(func._schema.name, name, ranks, tuple(tuple(t.shape) for t in tensors), dtype, **details)


def _arguments(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _inputs(arguments: dict[str, Any]) -> Any:
    """What a collective sends: its arguments called input, or all where none is (in-place forms, the dialect)."""
    named = [value for name, value in arguments.items() if name.startswith("input")]
    return named or list(arguments.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    for name in ("group", "group_name", "process_group"):
        value = arguments.get(name)
        if isinstance(value, str):
            return _resolve_process_group(GroupName(value))
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, dist.ProcessGroup):
            return value
    return None
