"""A device called `npu` that is all Python: neither torch_npu nor CANN, every operator is computed on the host.

    install()                 once in a process that has no other device of the kind; again is harmless
    torch.ones(3, device="npu")

What is as on the real device: tensors of another device are refused, but for copies and 0-dim numbers. Each process
has one device, ``npu:0``. ``storage.resize_(0)`` does not give memory back but fills it with NaN, so that a use
afterwards is noticed. Backward runs on the calling thread.

Private torch API used here, and only here: ``torch.utils.backend_registration``'s
``_setup_privateuseone_for_python_backend`` and ``_DummyBackendModule``, ``_get_privateuse1_backend_name``, the names
and kernels of the dispatcher, ``_ExcludeDispatchKeyGuard``, and ``OpOverload._op_dk``, another device's kernel.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import Tensor

from ep_fx.testing.npu import watch
from ep_fx.testing.npu.memory import DEVICE_TYPE, take_over_storages, to_device, to_host

aten = torch.ops.aten
_COPIES = frozenset({"aten::_copy_from_and_resize", "aten::copy_"})
_BASIC = (
    aten.empty.memory_format, aten.empty_strided.default, aten._copy_from.default, aten._local_scalar_dense.default,
    aten._to_copy.default,
)  # fmt: skip
"""Operators whose kernels for PrivateUse1 PyTorch looks for by themselves: the fallback does not reach them."""
_VIEWS = (
    aten.as_strided.default, aten.view.default, aten._reshape_alias.default, aten.unfold.default,
    aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor,
)  # fmt: skip
"""Views from which all others are made, and what puts a storage under a tensor. The CPU's kernels share the storage,
whatever its device: who waits for a collective finds it by the storage."""


_HOST_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
"""What is on for the CPU changes nothing on the device."""
_LIBRARIES: list[torch.library.Library] = []
"""Registrations, which live as long as their library; none while there is no device."""


class _Module(registration._DummyBackendModule):
    """``torch.npu``."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        _check_index(device if isinstance(device, int) else torch.device(device).index)

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs beside the host."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        """Random numbers are drawn by the generator of the CPU, which has its own seed."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def install() -> None:
    """Makes the device of this process.

    Raises:
        RuntimeError: torch_npu, or another device of the kind, is there already.
    """
    if _LIBRARIES:
        return
    name = torch._C._get_privateuse1_backend_name()
    if "torch_npu" in sys.modules or name != "privateuseone":
        found = "torch_npu" if "torch_npu" in sys.modules else f"a device called {name!r}"
        raise RuntimeError(
            f"the npu device of ep_fx.testing needs a process of its own: this one has {found} already; run the test "
            "on ranks, RankPool(..., device='npu')"
        )
    registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Module())
    torch.autograd.set_multithreading_enabled(False)  # else a thread wants the interpreter while it shuts down
    _take_over_operators()
    take_over_storages()


def installed() -> bool:
    """Whether this process has the device."""
    return bool(_LIBRARIES)


def _check_index(index: int | None) -> None:
    if index not in (None, 0):
        raise RuntimeError(f"there is no npu:{index}: each process has one device, npu:0")


# -- operators ---------------------------------------------------------------------------------------------------------
def run(op: torch._ops.OpOverload, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `kernel`, a function on CPU tensors, for a call of `op` with npu tensors.

    Results that are arguments stay these; other results are new tensors on the arguments' or new memory.

    Raises:
        RuntimeError: a tensor on another device, or another device asked for.
        NotImplementedError: `kernel` would resize an argument.
        ForbiddenError: see `ep_fx.testing.npu.watch`.
    """
    watch.note(op)
    name = op._schema.name
    aliases: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _enter_tensor(name, value, aliases)
        if isinstance(value, (list, tuple)):
            return type(value)([enter(item) for item in value])
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            _check_index(value.index)
            return torch.device("cpu")
        return value

    def leave(value: Any) -> Any:
        if isinstance(value, Tensor):
            return aliases[id(value)][1] if id(value) in aliases else to_device(value)
        if isinstance(value, (list, tuple)):
            return type(value)([leave(item) for item in value])
        return value

    with torch._C._ExcludeDispatchKeyGuard(_HOST_MODES):
        result = kernel(*enter(args), **{key: enter(value) for key, value in kwargs.items()})
    for host, tensor in aliases.values():
        if host.size() != tensor.size():
            raise NotImplementedError(f"{name} resized an argument, {tuple(tensor.size())} to {tuple(host.size())}")
    return leave(result)


def _enter_tensor(name: str, value: Tensor, aliases: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    if value.device.type == DEVICE_TYPE:
        host = to_host(value)
        aliases[id(host)] = host, value
        return host
    if value.dim() and name not in _COPIES:
        raise RuntimeError(
            f"{name}: expected all tensors on {DEVICE_TYPE}:0, got one of shape {tuple(value.shape)} on "
            f"{value.device}"
        )
    return value


def _fallback(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("pin_memory", None)
    if op is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if op is aten._copy_from.default:
        return run(aten.copy_.default, lambda source, target, *_: target.copy_(source), *args, **kwargs)
    if op is aten.histc.default:
        return run(op, _histogram, *args, **kwargs)
    return run(op, op, *args, **kwargs)


def _histogram(values: Tensor, *args: Any) -> Tensor:
    """Of integers too, which devices count and the CPU does not: transformers asks for it on a device."""
    counts: Tensor = aten.histc.default(values.double(), *args)
    return counts.to(values.dtype)


def _to_copy(source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    watch.note(aten._to_copy.default)
    target = source.device if device is None else torch.device(device)
    host = to_host(source) if source.device.type == DEVICE_TYPE else source
    copy: Tensor = aten._to_copy.default(host, **options)  # always new memory
    if target.type != DEVICE_TYPE:
        return copy.to(target)
    _check_index(target.index)
    return to_device(copy)


def _view(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    watch.note(op)
    return op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _take_over_operators() -> None:
    """Sends every operator to the host, but for those that consist of others."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for op in (*_BASIC, *_functional_compositions()):
        library.impl(op, functools.partial(_fallback, op), "PrivateUse1")
    for op in _VIEWS:
        library.impl(op, functools.partial(_view, op), "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # PyTorch would write to a copy of a target that is such a view
        library.impl(aten._copy_from.default, torch.library.fallthrough_kernel, key)
    _LIBRARIES.extend((everything, library))


def _functional_compositions() -> Iterator[torch._ops.OpOverload]:
    """Functional ATen operators whose kernel for all devices precedes a fallback: it would resize an empty result."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    basic = {op.name() for op in (*_BASIC, *_VIEWS)}
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name in basic or not any(has(name, key) for key in keys):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None and all(value.alias_info is None for value in (*op._schema.arguments, *op._schema.returns)):
            yield op
