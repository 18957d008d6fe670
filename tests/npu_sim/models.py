"""On each rank: an emitted module on npu tensors against the whole model on the CPU; outputs, gradients, training."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx.testing.npu.cann.simulate import CALLS
from tests.models.hf import hf_ids, tiny_hf
from tests.npu_sim.device import npu, npu_mesh
from tests.oracle import oracle, relative_error

STEPS, SHAPE = 3, (2, 12)

_ALL = {"num_experts_per_tok": 8}
ALL_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": _ALL,
    "qwen3_moe": _ALL,
    "deepseek_v3": {**_ALL, "n_group": 1, "topk_group": 1},
}
"""So that every token goes to every expert: which of two it goes to is no continuous function of what is rounded."""


@dataclass
class Findings:
    """How far a module on npu tensors is from the whole model on the CPU, on one rank.

    Args:
        output: relative error of the logits.
        gradients: relative error of each parameter's gradient.
        losses: relative error of the loss of each step of AdamW.
        parameters: relative error of each parameter's change after the last step.
        kernels: the fused kernels of torch_npu that ran in the first forward and backward, where they are simulated.
    """

    output: float
    gradients: dict[str, float]
    losses: list[float] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()


def measure(rank: int, arch: str, sizes: tuple[tuple[str, int], ...], dtype: torch.dtype, train: bool) -> Findings:
    """Runs the tiny model `arch` on a mesh of `sizes`; the reference is in float32 whatever `dtype` is."""
    mesh = npu_mesh(**dict(sizes))
    fields = {} if dtype is torch.float32 else ALL_EXPERTS[arch]
    module = ep_fx.transform(tiny_hf(arch, **fields).to(dtype), mesh)
    whole = tiny_hf(arch, **fields).to(dtype).float()  # from the rounded weights
    batches = [(hf_ids(source, *SHAPE),) for source in range(mesh.size())]
    targets = [(batch[0],) for batch in batches]
    want = oracle(lambda: whole, batches, _loss, targets)
    CALLS.clear()
    ids = batches[rank][0].to(npu(rank))
    output = module(input_ids=ids)
    _loss(output, ids).backward()
    findings = Findings(
        relative_error(output.logits.cpu(), want.outputs[rank].logits),
        {name: relative_error(_full(parameter.grad), want.gradients[name]) for name, parameter in _named(module)},
        kernels=frozenset(name.removeprefix("npu::") for name in CALLS if name.startswith("npu::")),
    )
    if train:
        _train(findings, rank, mesh.size(), module, whole)
    return findings


def _train(findings: Findings, rank: int, world: int, module: nn.Module, whole: nn.Module) -> None:
    """AdamW on both, from where they are; a new batch at each step."""
    before = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (module, whole)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [hf_ids(source + world * (step + 1), *SHAPE) for source in range(world)]
        losses = [_loss(whole(batch), batch) for batch in batches]
        torch.stack(losses).mean().backward()
        ids = batches[rank].to(npu(rank))
        loss = _loss(module(input_ids=ids), ids)
        loss.backward()
        findings.losses.append(relative_error(loss.cpu(), losses[rank]))
        for optimizer in optimizers:
            optimizer.step()
    after = dict(_named(module))
    for name, parameter in whole.named_parameters():
        moved = _full(after[name]) - before[name]
        findings.parameters[name] = relative_error(moved, parameter.detach() - before[name])


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def _loss(output: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()
