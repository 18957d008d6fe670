"""What runs on each rank of meshes with a dimension tp, for the requirements of tensor parallelism of experts."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx.graph import DATA_DIMS, Role
from ep_fx.testing import local_mesh
from tests.models.hf import hf_ids, tiny_hf
from tests.models.tiny_moe import SwiGLU, TinyMoE, next_token_loss, token_ids
from tests.models.titan import TitanModel

STEPS, LEARNING_RATE = 3, 1e-2
Sizes = dict[str, int]


class Explicit(nn.Module):
    """Experts that the user describes himself, with a bias of his own behind them."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 32, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(4, 16, 32) / 6)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return explicit(self, x, ids, weights)


def explicit(module: Explicit, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """In terms of `ep_fx.moe`."""

    def body(rows: Tensor, counts: Tensor) -> Tensor:
        product = torch.ops.ep_fx.grouped_mm
        return product(product(rows, module.w1, counts, None, True).tanh(), module.w2, counts, None, True)

    return ep_fx.moe(x, ids, weights, body, num_experts=4)


class WithExplicit(nn.Module):
    """Token ids to logits, by one layer of `Explicit` experts."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.router = nn.Embedding(32, 16), nn.Linear(16, 4)
            self.experts, self.head = Explicit(), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids).flatten(0, 1)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        return self.head(h + self.experts(h, chosen, weights)).view(*ids.shape, -1)


class Loop(nn.Module):
    """A list of experts and a Python loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(SwiGLU(16, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, choices = torch.where(ids == number)
            y.index_add_(0, rows, expert(tokens[rows]) * weights[rows, choices].unsqueeze(-1))
        return y.view_as(x)


class WithLoop(nn.Module):
    """Token ids to logits, by one `Loop`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.moe, self.head = nn.Embedding(32, 16), Loop(), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        return self.head(h + self.moe(h))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scores after, by the block": lambda: TinyMoE(grouped=True, shared=True),
    "scores before": lambda: TinyMoE(blocks=1, grouped=True, scores="keyword", score="before"),
    "scores after": lambda: TinyMoE(blocks=1, scores="positional", score="after"),
    "explicit": WithExplicit,
    "mixtral": lambda: tiny_hf("mixtral", num_hidden_layers=1),
    "gpt_oss": lambda: tiny_hf("gpt_oss", num_hidden_layers=1),
    "deepseek_v3": lambda: tiny_hf("deepseek_v3"),
}


def data_rank(mesh: DeviceMesh) -> int:
    """Which of the ranks with tokens of their own this is; the same along tp."""
    index = 0
    for dim in DATA_DIMS:
        if dim in (mesh.mesh_dim_names or ()):
            index = index * mesh[dim].size() + mesh[dim].get_local_rank()
    return index


def batch(model: str, index: int) -> Tensor:
    """Token ids of one data rank."""
    return token_ids(index) if isinstance(MODELS[model](), (TinyMoE, WithExplicit)) else hf_ids(index)


def logits(module: nn.Module, ids: Tensor) -> Tensor:
    """Logits, whatever the output class."""
    output = module(ids)
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[no-any-return]


class Run(NamedTuple):
    """Of one rank.

    Args:
        index: which data rank it is.
        broken: rules that the graph breaks.
        parameters: whole, as transformed.
        logits: of the rank's batch.
        gradients: whole.
        norm: of all gradients, before clipping.
        trained: parameters after the steps, whole.
        reloaded: parameters after a fresh module loaded the state dict of the trained one.
        local_shapes: of the experts' shards.
    """

    index: int
    broken: tuple[str, ...]
    parameters: dict[str, Tensor]
    logits: Tensor
    gradients: dict[str, Tensor]
    norm: Tensor
    trained: dict[str, Tensor]
    reloaded: dict[str, Tensor]
    local_shapes: dict[str, tuple[int, ...]]


def whole(values: Any) -> dict[str, Tensor]:
    """Full tensors of DTensors, copied: a replicated one would be the parameter itself."""
    return {name: value.detach().full_tensor().clone() for name, value in values}


def run(rank: int, sizes: Sizes, model: str, plan: Any, steps: int) -> Run:
    """A transform, a pass, and AdamW with clipping."""
    if model == "explicit":
        ep_fx.register_experts(Explicit, explicit)
    mesh = local_mesh(**sizes)
    module = ep_fx.transform(MODELS[model](), mesh, plan=plan)
    parameters = whole(module.named_parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    ids = batch(model, data_rank(mesh))
    output = logits(module, ids)
    next_token_loss(output, ids).backward()
    gradients = whole((n, p.grad) for n, p in module.named_parameters())
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for step in range(steps):
        if step:
            next_token_loss(logits(module, ids), ids).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = whole(module.named_parameters())
    other = ep_fx.transform(MODELS[model](), mesh, plan=plan)
    other.load_state_dict(module.state_dict())
    shapes = {n: tuple(p.to_local().shape) for n, p in module.named_parameters() if ".experts." in n}  # type: ignore[attr-defined]
    assert isinstance(norm, DTensor)
    return Run(
        data_rank(mesh), module.verify(types=True).broken, parameters, output.detach(), gradients, norm.full_tensor(),
        trained, whole(other.named_parameters()), shapes,
    )


def checkpointed(rank: int, sizes: Sizes, other: Sizes, model: str, folder: str) -> dict[str, Tensor]:
    """A distributed checkpoint saved on one mesh and loaded on another."""
    module = ep_fx.transform(MODELS[model](), local_mesh(**sizes))
    dcp.save(module.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        fresh = MODELS[model]()
        for parameter in fresh.parameters():
            parameter.zero_()
    reader = ep_fx.transform(fresh, local_mesh(**other))
    state = reader.state_dict()
    dcp.load(state, checkpoint_id=folder)
    reader.load_state_dict(state)
    return whole(reader.named_parameters())


def checked(rank: int, sizes: Sizes, model: str) -> tuple[list[str], int]:
    """What `ep_fx.check` finds beyond rounding, and how many sums over tp the graph has."""
    make = {"a list and a loop": WithLoop, "torchtitan": TitanModel}[model]
    mesh = local_mesh(**sizes)
    ids = token_ids(data_rank(mesh))
    report = ep_fx.check(make(), mesh, ids, tolerance=1e-5 if model == "a list and a loop" else 2e-2)
    module = ep_fx.transform(make(), mesh, example_inputs=(ids,))
    wrong = {**report.outputs, **report.gradients}
    return [n for n, error in wrong.items() if not error <= report.tolerance], len(module.graph.nodes(Role.ALL_REDUCE))
