"""Unmodified causal language models of transformers, tiny; the same random weights on every rank."""
from __future__ import annotations

from typing import Any

from torch import nn

from tests.models.architectures import build
from tests.models.architectures import token_ids as hf_ids
from tests.models.families import row

ARCHITECTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe")
"""Those that many tests use; the whole table is in `tests.models.families`."""


def tiny_hf(arch: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """The model of the row `arch`, in train mode.

    Args:
        arch: name of the row.
        seed: seed of the weights; the global generator is left as it was.
        overrides: fields of the config.
    """
    return build(row(arch), seed=seed, **overrides)


__all__ = ["ARCHITECTURES", "hf_ids", "tiny_hf"]
