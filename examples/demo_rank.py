"""What each rank of the demo runs: this is all the code a user writes.

    mesh -> ep_fx.transform -> ordinary training loop -> pictures

Beside it, rank 0 trains the untouched model in one process on the batches of all ranks: the reference.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import ep_fx

BATCH, LENGTH, LEARNING_RATE = 2, 32, 3e-3


@dataclass
class Result:
    """What one rank has to tell."""

    losses: list[float]
    reference: list[float]
    build_seconds: float
    step_seconds: float
    report: str
    collectives: str
    graph_nodes: int
    pictures: list[str]


def tiny_mixtral() -> MixtralForCausalLM:
    """An ordinary Mixtral with random weights, equal on all ranks."""
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=256,
        )
    )


def batch_of(rank: int) -> torch.Tensor:
    """The token ids [BATCH, LENGTH] of one rank; the demo over-fits them."""
    return torch.randint(3, 256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss: the user's own."""
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(rank: int, world_size: int, steps: int, folder: str) -> Result:
    """Transforms, trains `steps` steps, and on rank 0 writes the pictures to `folder`."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("fsdp", "ep"))
    ids = batch_of(rank)
    started = time.perf_counter()
    module = ep_fx.transform(tiny_mixtral(), mesh, example_kwargs={"input_ids": ids})
    built = time.perf_counter() - started

    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    reference = _Reference(world_size) if rank == 0 else None
    losses: list[float] = []
    seconds = 0.0
    with _progress(rank) as progress:
        for _ in progress.track(range(steps), description="training on 4 ranks"):
            started = time.perf_counter()
            loss = loss_of(module, ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - started
            losses.append(loss.item())
            if reference is not None:
                reference.step()
    pictures = (
        [str(module.visualize(Path(folder) / f"graph.{kind}")) for kind in ("svg", "html", "txt")] if rank == 0 else []
    )
    return Result(
        losses,
        reference.losses if reference else [],
        built,
        seconds / steps,
        str(module.verify()),
        module.explain_collectives(),
        len(module.graph.graph.nodes),
        pictures,
    )


class _Reference:
    """The same training in one process, on the batches of all ranks, with plain PyTorch."""

    def __init__(self, world_size: int) -> None:
        self.model = tiny_mixtral()
        self.batches = [batch_of(rank) for rank in range(world_size)]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = torch.stack([loss_of(self.model, ids) for ids in self.batches]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def _progress(rank: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=rank != 0)
