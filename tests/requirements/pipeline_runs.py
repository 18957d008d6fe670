"""One rank's part of a pipeline: its stages, each transformed on its submesh, under a stock schedule of torch."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import ep_fx
from ep_fx.testing import local_mesh
from tests.models.hf import tiny_hf
from tests.models.tiny_moe import TinyMoE, token_ids
from tests.requirements.fsdp_ep_runs import whole

P = {"pp": 2, "fsdp": 1, "ep": 2}
MICROBATCHES = 4
ROWS = 2  # of one micro-batch
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def make_model(blocks: int) -> TinyMoE:
    """The whole model, as the oracle has it."""
    return TinyMoE(blocks, shared=True, grouped=True)


def make_mixtral() -> nn.Module:
    """Two layers."""
    return tiny_hf("mixtral")


class TinyStage(nn.Module):
    """Some blocks of a TinyMoE under the names that they have there, the embedding before and the head behind."""

    def __init__(self, model: TinyMoE, blocks: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): model.blocks[index] for index in blocks})
        self.embedding = model.embedding if 0 in blocks else None
        last = len(model.blocks) - 1 in blocks
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, h: Tensor) -> Tensor:
        if self.embedding is not None:
            h = self.embedding(h)
        for block in self.blocks.values():
            h = block(h)
        return h if self.head is None or self.norm is None else self.head(self.norm(h))


class MixtralStage(nn.Module):
    """One of the two halves of `make_mixtral`: the library's own decoder, cut short."""

    def __init__(self, index: int) -> None:
        super().__init__()
        whole_model = make_mixtral()
        self.model, self.lm_head = whole_model.model, whole_model.lm_head if index else None
        self.model.layers = self.model.layers[index : index + 1]
        self.model.config.num_hidden_layers = 1
        if index:
            self.model.embed_tokens = None
        else:
            self.model.norm = nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        given = {"input_ids": h} if self.lm_head is None else {"inputs_embeds": h}
        h = self.model(**given, use_cache=False).last_hidden_state
        return h if self.lm_head is None else self.lm_head(h)


def make_stage(model: str, index: int, count: int) -> nn.Module:
    """Stage `index` of `count`."""
    return MixtralStage(index) if model == "mixtral" else TinyStage(make_model(count), [index])


def full_name(model: str, index: int, name: str) -> str:
    """The whole model's name of a parameter of stage `index`."""
    return name.replace("layers.0.", f"layers.{index}.") if model == "mixtral" else name


class PipelineRun(NamedTuple):
    """What one rank has after its steps.

    Args:
        output: the merged output, on ranks of the last stage.
        losses: loss of each micro-batch of the last step, on ranks of the last stage.
        gradients: all gradients of the rank's stages, whole, of the last step; None where there is none.
        evaluated: the merged output of the schedule's `eval`, on ranks of the last stage, where asked for.
    """

    output: Tensor | None
    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    evaluated: Tensor | None


def batch_of(data_rank: int) -> Tensor:
    """All micro-batches of one data rank: ids [MICROBATCHES x ROWS, 8]."""
    return torch.cat([token_ids(data_rank + 10 * index, batch=ROWS) for index in range(MICROBATCHES)])


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy, another weight for each token, so that tokens that change places are noticed."""
    each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    return (each * torch.linspace(0.5, 1.5, each.numel())).mean()


def pipeline(
    rank: int, schedule: str, model: str = "tiny", steps: int = 1, evaluate: bool = False, ranks: int = 4
) -> PipelineRun:
    """`steps` steps of the stock schedule of that name, gradients fresh in each, then one evaluation if asked for."""
    mesh = local_mesh(**(P if ranks == 4 else {"pp": 1, "fsdp": 1, "ep": 1}))
    kind = get_schedule_class(schedule)
    multi = issubclass(kind, PipelineScheduleMulti)
    count = mesh.size(0) * (2 if multi else 1)
    modules = {
        index: ep_fx.transform(make_stage(model, index, count), mesh["fsdp", "ep"])
        for index in _stages_of(mesh, count, schedule)
    }
    stages = [
        PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp"))
        for index, module in modules.items()
    ]
    runner = kind(stages if multi else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)  # type: ignore[arg-type]
    ids, last = batch_of(mesh.get_local_rank("ep")), count - 1 in modules
    given = (ids,) if 0 in modules else ()
    for _ in range(steps):
        for module in modules.values():
            module.zero_grad()
        losses: list[Tensor] = []
        output = runner.step(*given, target=ids if last else None, losses=losses if last else None)
    named = [(full_name(model, i, n), p) for i, m in modules.items() for n, p in m.named_parameters()]
    gradients = {n: None if p.grad is None else whole(p.grad) for n, p in named}
    evaluated = runner.eval(*given, target=ids if last else None) if evaluate else None
    return PipelineRun(output, [x.detach() for x in losses], gradients, evaluated)


def _stages_of(mesh: DeviceMesh, count: int, schedule: str) -> list[int]:
    mine = mesh.get_local_rank("pp")
    return [mine, count - 1 - mine] if schedule in V_SHAPED else list(range(mine, count, mesh.size(0)))


def refusal(rank: int, schedule: str) -> str:
    """What a schedule says that fails, with all its stages on one rank."""
    try:
        pipeline(rank, schedule, ranks=1)
    except RuntimeError as error:
        return str(error)
    return ""
