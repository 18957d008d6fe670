"""Tensors of the `npu` device on host memory, and CPU tensors on the memory of those.

A tensor moves to the device as a DLPack capsule of a CPU tensor that is relabelled: PyTorch imports the device type
"extension" as PrivateUse1. It has a data pointer of its own, so parameters, views, detach and autograd behave as on a
device written in C++. Nothing is copied in either direction. A tensor that stands for the conjugate, or the negative,
of its memory does so on the other side too.

Private torch API used here, and only here: ``torch._C._to_dlpack`` and ``_from_dlpack``, the layout of a capsule, and
``torch._neg_view``.
"""
from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

DEVICE_TYPE = "npu"
_CPU, _EXTENSION = 1, 12
"""DLPack's numbers of these device types."""

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def to_device(tensor: Tensor) -> Tensor:
    """The tensor of ``npu:0`` on the memory of the CPU tensor `tensor`, without its history of autograd."""
    if tensor.is_conj() or tensor.is_neg():  # DLPack has no word for either
        return _read_alike(tensor, to_device(_read_alike(tensor, tensor.detach())))
    capsule = torch._C._to_dlpack(tensor.detach())
    managed = _pointer(capsule, b"dltensor")
    device = ctypes.cast(managed + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int32))  # behind `data`
    if device[0] != _CPU:
        raise ValueError(f"expected a tensor on the CPU, got one on {tensor.device}")
    device[0], device[1] = _EXTENSION, 0
    moved: Tensor = torch._C._from_dlpack(capsule)
    return moved


def to_host(tensor: Tensor) -> Tensor:
    """The CPU tensor on the memory of the npu tensor `tensor`, with its sizes and strides."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or tensor.numel() == 0:
        return _read_alike(tensor, torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype))
    memory = bytes_of(storage).untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    return _read_alike(tensor, host)


def _read_alike(tensor: Tensor, other: Tensor) -> Tensor:
    """A view of `other` that is conjugated, and negated, where `tensor` is: twice is none."""
    other = other.conj() if tensor.is_conj() else other
    return torch._neg_view(other) if tensor.is_neg() else other


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of an npu storage as a CPU tensor of bytes; it keeps the storage alive."""
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=torch.uint8)
    buffer = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    buffer.owner = storage  # type: ignore[attr-defined]  # the CPU tensor keeps the buffer, and that the memory
    return torch.frombuffer(buffer, dtype=torch.uint8)


def take_over_storages() -> None:
    """PyTorch has no allocator for the device, so storages on it are copied and freed here, from now on.

    What is freed is overwritten, as another use of the memory would: all floating-point numbers become NaN.
    """
    resize: Any = torch.UntypedStorage.resize_
    clone: Any = torch.UntypedStorage.clone

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != DEVICE_TYPE:
            return resize(storage, size)
        if size == 0 < storage.nbytes():
            ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
        elif size != storage.nbytes():
            raise NotImplementedError(f"a storage of {storage.nbytes()} bytes on npu cannot become {size} bytes")
        return storage

    def clone_(storage: torch.UntypedStorage) -> Any:
        if storage.device.type != DEVICE_TYPE:
            return clone(storage)
        return to_device(bytes_of(storage).clone()).untyped_storage()

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.clone = clone_  # type: ignore[method-assign,assignment]
