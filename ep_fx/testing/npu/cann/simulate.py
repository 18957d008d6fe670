"""Run the operators of npu tensors on the CPU, below the real torch_npu, whose allocator hands out host memory.

`install` replaces, once and for the whole process, what would launch a kernel of the device: operators of ATen by the
CPU's, those of torch_npu by our references, both on CPU tensors that share the npu tensors' bytes. No mode is active,
so that torch.compile sees ordinary npu tensors. Collectives stay what they are: the real ProcessGroupHCCL.

Two rules, each the cure of a silent or rare failure: TASK_QUEUE_ENABLE=0 (otherwise torch_npu queues collectives on a
thread of the host, and kernels that run at once read too early: wrong numbers), and backward on the calling thread
(otherwise the engine's thread of the device asks for the GIL of an interpreter that ends: the process aborts).

Private torch API used here: ``_dispatch_get_all_op_names``, ``_dispatch_has_kernel_for_dispatch_key``.
"""
from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ep_fx.testing.npu.reference import REFERENCES

aten = torch.ops.aten

CALLS: Counter[str] = Counter()
"""How often each operator was simulated in this process, e.g. ``npu::npu_swiglu``."""

_OWN = frozenset(
    {
        aten.empty.memory_format, aten.empty_strided.default, aten.detach.default, aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor, aten.set_.default,
        aten.record_stream.default, aten.is_pinned.default, aten.resize_.default,
    }
)
"""Operators that touch memory only as torch_npu's allocator does; all views are such, too."""
_KEYS = ("PrivateUse1", "AutogradPrivateUse1")


@functools.cache
def install() -> int:
    """Replaces the kernels and returns their number; once per process.

    Raises:
        RuntimeError: TASK_QUEUE_ENABLE was not "0" when the process started, or torch_npu was not imported.
    """
    if os.environ.get("TASK_QUEUE_ENABLE") != "0":
        raise RuntimeError("simulated kernels run at once: set TASK_QUEUE_ENABLE=0 before the process starts")
    if not hasattr(torch, "npu"):
        raise RuntimeError("import torch_npu first: there are no kernels to replace")
    torch.autograd.set_multithreading_enabled(False)
    return sum(_replace(full) for full in torch._C._dispatch_get_all_op_names())


_LIBRARIES: dict[str, torch.library.Library] = {}  # kernels live as long as these


def _replace(full: str) -> bool:
    """Replaces what torch_npu registered for one operator; False where there is nothing to replace."""
    namespace, _, name = full.partition("::")
    if namespace not in ("aten", "npu") or not torch._C._dispatch_has_kernel_for_dispatch_key(full, "PrivateUse1"):
        return False
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    if op is None or op in _OWN or _is_view(op) or (namespace == "npu" and _reference(full) is None):
        return False
    library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "IMPL"))
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    if not composite or full in ("aten::matmul", "aten::contiguous"):
        library.impl(op, functools.partial(_simulated, op), "PrivateUse1")
        return True
    for key in _KEYS:  # one_hot, softmax.int, ...: torch_npu has kernels of its own; PyTorch's composition is back
        library.impl(op, functools.partial(_decomposed, op), key)
    return True


def _is_view(op: OpOverload) -> bool:
    aliases = (result.alias_info for result in op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def _decomposed(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    return op.decompose(*args, **kwargs)


def _simulated(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`op` on the CPU, its results on the device of its arguments; on fakes `op` itself."""
    flat, structure = tree_flatten((args, kwargs))
    devices = [device for value in flat if (device := _npu_of(value)) is not None]
    if not devices or any(isinstance(value, FakeTensor) for value in flat):
        return op(*args, **kwargs)
    CALLS[op._schema.name] += 1
    if op is aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    originals: dict[int, Tensor] = {}
    cpu = [_on_cpu(value, originals) for value in flat]
    cpu_args, cpu_kwargs = tree_unflatten(cpu, structure)
    results, shape = tree_flatten(_kernel(op)(*cpu_args, **cpu_kwargs))
    found = [_on_npu(result, originals, devices[0]) for result in results]
    del cpu  # the addresses in `originals` are theirs
    return tree_unflatten(found, shape)


def _npu_of(value: Any) -> torch.device | None:
    """The npu that an argument is on, or names."""
    device = value.device if isinstance(value, Tensor) else value
    return device if isinstance(device, torch.device) and device.type == "npu" else None


def _on_cpu(value: Any, originals: dict[int, Tensor]) -> Any:
    """An argument for a CPU kernel; `originals` learns whose bytes a tensor has, by its address."""
    if _npu_of(value) is None:
        return value
    if not isinstance(value, Tensor):
        return torch.device("cpu")
    alias = cpu_alias(value)
    originals[id(alias)] = value
    return alias


def _on_npu(result: Any, originals: dict[int, Tensor], device: torch.device) -> Any:
    """A result of a CPU kernel: the argument that it wrote, or its bytes in memory of the device."""
    if not isinstance(result, Tensor):
        return result
    return originals[id(result)] if id(result) in originals else _to_npu(result, device)


def cpu_alias(tensor: Tensor) -> Tensor:
    """A CPU tensor on the bytes of an npu tensor, which it keeps alive; a write to one is a write to both."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    buffer.owner = storage  # type: ignore[attr-defined]  # who has the alias has the buffer
    memory = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _to_npu(tensor: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    cpu_alias(copy).copy_(tensor)
    return copy


def _to_copy(
    tensor: Tensor, *, device: torch.device | None = None, non_blocking: bool = False, **options: Any
) -> Tensor:
    """``aten._to_copy``, the one operator whose result may be elsewhere than its arguments."""
    target = tensor.device if device is None else torch.device(device)
    copy = aten._to_copy.default(cpu_alias(tensor) if tensor.device.type == "npu" else tensor, **options)
    return _to_npu(copy, target) if target.type == "npu" else copy


def _kernel(op: OpOverload) -> Callable[..., Any]:
    return _reference(op._schema.name) or op


def _reference(name: str) -> Callable[..., Any] | None:
    """What computes `name` where the CPU has no kernel for it."""
    return _WHOLE.get(name) or REFERENCES.get(name.removeprefix("npu::"))


def _matmul_backward(grad: Tensor, a: Tensor, b: Tensor, mask: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """torch_npu's backward of matmul, which it keeps whole: gradients of `a` and `b`, broadcast as `matmul` does."""
    rows = a.unsqueeze(0) if a.dim() == 1 else a
    columns = b.unsqueeze(1) if b.dim() == 1 else b
    if b.dim() == 1:
        grad = grad.unsqueeze(-1)
    if a.dim() == 1:
        grad = grad.unsqueeze(-2)
    grad_a = torch.matmul(grad, columns.mT).sum_to_size(rows.shape).reshape(a.shape) if mask[0] else None
    grad_b = torch.matmul(rows.mT, grad).sum_to_size(columns.shape).reshape(b.shape) if mask[1] else None
    return grad_a, grad_b


def _linear_backward(
    x: Tensor, grad: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """torch_npu's backward of linear: gradients of `x`, `weight` and the bias."""
    rows, grads = x.reshape(-1, x.size(-1)), grad.reshape(-1, grad.size(-1))
    grad_x = (grads @ weight).reshape(x.shape) if mask[0] else None
    return grad_x, grads.T @ rows if mask[1] else None, grads.sum(0) if mask[2] else None


def _unpermute_and_keep(permuted: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """What torch_npu's formula for unpermute calls: the second result is what it saves for backward."""
    return REFERENCES["npu_moe_token_unpermute"](permuted, *args), permuted.clone()


_WHOLE: dict[str, Callable[..., Any]] = {
    "aten::matmul_backward": _matmul_backward,
    "aten::linear_backward": _linear_backward,
    "npu::_npu_moe_token_unpermute": _unpermute_and_keep,
}
"""Operators that only torch_npu's autograd formulas call."""
