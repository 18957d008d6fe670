"""What runs on each rank: a transformed model against the same model whole, on the rank's own tokens.

The reference needs no transform: each rank runs the whole model on its batch, and the gradients of the ranks are
averaged, which is the gradient of the mean over ranks of each rank's loss.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx.testing.ranks import local_mesh
from tests.hf.cases import CASES, SHAPES, Meaning
from tests.models.hf import tiny_hf
from tests.oracle import relative_error

STEPS, LEARNING_RATE = 6, 1e-3


@dataclass
class Findings:
    """How far a transformed model is from the whole one, on one rank.

    Args:
        names: parameter names of both.
        captures: programs that a case needed, by case.
        classes: output classes (transformed, whole), by case.
        fields: names of the tensors in the outputs (transformed, whole), by case.
        outputs: relative error of each output field, by case and shape.
        gradients: relative error of each gradient, by case and shape.
        losses: relative error of the loss at each training step.
        norms: relative error of the gradient norm before clipping, at each training step.
    """

    names: tuple[list[str], list[str]]
    captures: dict[str, int] = field(default_factory=dict)
    classes: dict[str, tuple[str, str]] = field(default_factory=dict)
    fields: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    outputs: dict[str, dict[str, float]] = field(default_factory=dict)
    gradients: dict[str, dict[str, float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def measure(rank: int, arch: str, cases: tuple[str, ...], train: bool) -> Findings:
    """Runs `cases` of `arch` on mesh (fsdp 2, ep 2), then trains where asked."""
    whole = tiny_hf(arch)
    module = ep_fx.transform(tiny_hf(arch), local_mesh(fsdp=2, ep=2))
    findings = Findings(([n for n, _ in module.named_parameters()], [n for n, _ in whole.named_parameters()]))
    for case in cases:
        before = len(module.programs)
        for shape in SHAPES:
            _compare(findings, case, shape, rank, module, whole)
        findings.captures[case] = len(module.programs) - before
    if train:
        _train(findings, rank, module, whole)
    return findings


def _compare(
    findings: Findings, case: str, shape: tuple[int, int], rank: int, module: nn.Module, whole: nn.Module
) -> None:
    kwargs = CASES[case](rank, *shape)
    meaning = Meaning.of(kwargs)
    got, want = module(**kwargs), whole(**kwargs)
    meaning.loss(got, kwargs).backward()
    meaning.loss(want, kwargs).backward()
    gradients = averaged_gradients(whole)
    fields, expected = meaning.fields(got), meaning.fields(want)
    place = f"{shape[0]}x{shape[1]}"
    findings.classes[case] = (type(got).__name__, type(want).__name__)
    findings.fields[case] = (sorted(fields), sorted(expected))
    findings.outputs.setdefault(case, {}).update(
        {f"{place} {n}": relative_error(fields[n], expected[n]) for n in expected if n in fields}
    )
    findings.gradients.setdefault(case, {}).update(
        {f"{place} {n}": relative_error(full(p.grad), gradients[n]) for n, p in module.named_parameters()}
    )
    module.zero_grad()
    whole.zero_grad()


def _train(findings: Findings, rank: int, module: nn.Module, whole: nn.Module) -> None:
    """AdamW with clipping; two micro-batches a step whose forwards come before both backwards (F0 F1 B0 B1)."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in (module, whole)]
    for step in range(STEPS):
        batches = [CASES["ids_only"](rank + 4 * (2 * step + i), *SHAPES[i]) for i in range(2)]
        losses = [_accumulate(model, batches) for model in (module, whole)]
        for parameter, gradient in zip(whole.parameters(), averaged_gradients(whole).values(), strict=True):
            parameter.grad = gradient
        norms = [full(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) for model in (module, whole)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        findings.losses.append(relative_error(*losses))
        findings.norms.append(relative_error(*norms))


def _accumulate(model: nn.Module, batches: list[dict[str, Any]]) -> Tensor:
    losses = [Meaning.of(batch).loss(model(**batch), batch) for batch in batches]
    for loss in losses:
        (loss / len(losses)).backward()
    total = torch.stack([loss.detach() for loss in losses]).mean()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def averaged_gradients(whole: nn.Module) -> dict[str, Tensor]:
    """Mean over the ranks of each gradient; zeros where there is none."""
    result = {}
    for name, parameter in whole.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradient)
        result[name] = gradient / dist.get_world_size()
    return result


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
