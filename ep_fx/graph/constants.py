"""Constants of a graph in its text: small ones with their values, large ones by a digest of their bytes.

    %constant: f32[3] = constant("_tensor_constant0", [0.0, 0.5, 1.0])
    %constant_1: i64[4096] = constant("_tensor_constant1", "sha256:9f86d081884c7d65")
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from typing import Any

import torch

from ep_fx.graph.literals import Reader, literal_text

_SPELLED_OUT = 16
"""Entries of a constant that is written out."""
_UNKNOWN = "unknown"


def constant_text(name: str, value: torch.Tensor | None) -> str:
    """The call that stands for a constant; its type is written elsewhere."""
    return f"constant({json.dumps(name)}, {_content(value)})"


def _content(value: torch.Tensor | None) -> str:
    if value is None or not _has_values(value):
        return f'"{_UNKNOWN}"'
    return _nested(value.tolist()) if value.numel() <= _SPELLED_OUT else f'"{digest(value)}"'


def _has_values(value: torch.Tensor) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return plain and value.device.type != "meta"


def _nested(value: Any) -> str:
    return f"[{', '.join(map(_nested, value))}]" if isinstance(value, list) else literal_text(value)


def digest(value: torch.Tensor) -> str:
    """``sha256:`` and the first 16 digits of the hash of the bytes of `value`."""
    flat = value.detach().cpu().contiguous()
    data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
    return f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"


def read_constant(text: str, like: torch.Tensor | None, given: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Name and value of the constant that `text`, without ``constant``, stands for.

    Args:
        text: ``("name", content)``.
        like: a value of its type.
        given: tensors by name, for constants that are not written out. A large one that is not there is a tensor on the
            meta device: the graph can be verified, and not run.

    Raises:
        ValueError: another form, or a tensor of other bytes.
    """
    reader = Reader(text, {})
    reader.expect("(")
    name, content = reader.items(")")
    if like is None:
        raise ValueError("a constant needs a type: '%name: f32[2] = constant(..)'")
    if not isinstance(content, str):
        return name, torch.tensor(content, dtype=like.dtype, device=like.device).reshape(like.shape)
    value = given.get(name)
    if value is None:
        return name, torch.empty(like.shape, dtype=like.dtype, device="meta")
    if content != _UNKNOWN and digest(value) != content:
        raise ValueError(f"constant {name!r} has other bytes: expected {content}, got {digest(value)}")
    return name, value
