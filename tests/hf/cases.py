"""Ways in which people call a causal language model of transformers, with inputs that differ on every rank.

Each case is one input structure: its calls differ in sizes and in values only, so one capture must serve them all.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.hf import hf_ids

SHAPES = ((2, 8), (3, 6))
Kwargs = dict[str, Any]


def ids_only(rank: int, batch: int, length: int) -> Kwargs:
    """Nothing but ids; the use of a generation cache is left at its default."""
    return {"input_ids": hf_ids(rank, batch, length)}


def padded(rank: int, batch: int, length: int) -> Kwargs:
    """A mask with zeros: on the left for an even batch, on the right for an odd one; their number differs by rank."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    zeros = 1 + rank % 3
    if batch % 2:
        mask[-1, -zeros:] = 0
    else:
        mask[0, :zeros] = 0
    return {"input_ids": hf_ids(rank, batch, length), "attention_mask": mask}


def labelled(rank: int, batch: int, length: int) -> Kwargs:
    """Labels, some of them -100; a different number on each rank."""
    ids = hf_ids(rank, batch, length)
    labels = ids.clone()
    labels[0, : 2 + rank] = -100
    return {"input_ids": ids, "labels": labels}


def with_router_logits(rank: int, batch: int, length: int) -> Kwargs:
    """Labels, and the routers' logits with the auxiliary loss where the architecture has one."""
    return {**labelled(rank, batch, length), "output_router_logits": True}


def everything(rank: int, batch: int, length: int) -> Kwargs:
    """A mask, labels that leave out what it leaves out, and the routers' logits."""
    kwargs = padded(rank, batch, length)
    labels = kwargs["input_ids"].masked_fill(kwargs["attention_mask"] == 0, -100)
    return {**kwargs, "labels": labels, "output_router_logits": True}


CASES: dict[str, Callable[[int, int, int], Kwargs]] = {
    case.__name__: case for case in (ids_only, everything, padded, labelled, with_router_logits)
}


@dataclass(frozen=True)
class Meaning:
    """What of an output means something: at a padded position any value may stand.

    Args:
        kept: ``[batch, length]``, true where there is a token.
    """

    kept: Tensor

    @classmethod
    def of(cls, kwargs: Kwargs) -> Meaning:
        """From a call's arguments."""
        return cls(kwargs.get("attention_mask", torch.ones_like(kwargs["input_ids"])).bool())

    def fields(self, output: Any) -> dict[str, Tensor]:
        """Every tensor of `output` by field, meaningless rows left out; a generation cache is no tensor."""
        found: dict[str, Tensor] = {}
        for name, value in output.items():
            parts = enumerate(value) if isinstance(value, tuple) else [("", value)]
            found.update({f"{name}{index}": part for index, part in parts if isinstance(part, Tensor)})
        for name in found:
            if name == "logits":
                found[name] = found[name][self.kept]
            elif name.startswith("router_logits"):
                found[name] = found[name][self.kept.flatten()]
        return found

    def loss(self, output: Any, kwargs: Kwargs) -> Tensor:
        """The model's own loss, or the mean cross entropy of each token given those before it."""
        if output.loss is not None:
            return output.loss
        both = self.kept[:, 1:] & self.kept[:, :-1]
        return F.cross_entropy(output.logits[:, :-1][both], kwargs["input_ids"][:, 1:][both])
