"""What runs on each rank: a model transformed for an npu mesh, against the same model whole on the CPU.

Each rank has a batch of its own. The reference's gradients are averaged over the ranks, which is the gradient of the
mean of their losses. Of one capture three things are measured: the model as it is, the model with routers that know no
token from another, so that all go to the same experts, and training.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ep_fx
from ep_fx.targets.npu.kernels import KERNELS
from ep_fx.testing.npu import only, recorded
from ep_fx.testing.ranks import local_mesh
from tests.hf.measure import averaged_gradients, full
from tests.models.hf import hf_ids, tiny_hf
from tests.oracle import relative_error

STEPS, LEARNING_RATE = 3, 1e-3


@dataclass
class Findings:
    """How far a transformed model is from the whole one, on one rank.

    Args:
        tokens: largest relative error of the logits of one token, by what was measured.
        gradients: relative error of each gradient, by what was measured.
        used: the experts that any token of any rank went to, by parameter, with routers that know no token.
        losses: relative error of the loss at each step of training.
        parameters: relative error of each parameter after the last step.
        nodes: nodes of the lowered graph that call each fused kernel.
        kernels: calls of each fused kernel in one forward and backward.
    """

    tokens: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, dict[str, float]] = field(default_factory=dict)
    used: dict[str, list[int]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)


def measure(rank: int, arch: str, dtype: torch.dtype) -> Findings:
    """Runs `arch` with weights in `dtype` on mesh (fsdp 2, ep 2); the reference is in fp32, with the same weights."""
    whole = tiny_hf(arch).to(dtype).float()
    module = ep_fx.transform(tiny_hf(arch).to(dtype), local_mesh(fsdp=2, ep=2))
    findings = Findings()
    with recorded() as calls, only(_on_device()):
        _compare(findings, "spread", rank, module, whole)
    findings.kernels = {name[5:]: count for name, count in calls.items() if name.startswith("npu::")}
    targets = [getattr(node.target, "__name__", "") for node in module.lowered]
    findings.nodes = dict(Counter(name for name in targets if name in KERNELS))
    natural = {name: value.clone() for name, value in whole.state_dict().items()}
    whole.load_state_dict({n: torch.zeros_like(v) if n.endswith("gate.weight") else v for n, v in natural.items()})
    module.load_state_dict(whole.state_dict())
    expected = _compare(findings, "one_side", rank, module, whole)
    for name, gradient in expected.items():
        if ".experts." in name and gradient.dim() == 3:
            findings.used[name] = gradient.flatten(1).norm(dim=1).nonzero().flatten().tolist()
    whole.load_state_dict(natural)
    module.load_state_dict(natural)
    _train(findings, rank, module, whole)
    return findings


def _on_device() -> frozenset[str]:
    """Operators of ATen that torch_npu does not run on the CPU."""
    folder = files("ep_fx.targets.npu")
    texts = [(folder / name).read_text() for name in ("aten_ops.txt", "aten_compositions.txt")]
    return frozenset("".join(texts).split())


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _compare(findings: Findings, name: str, rank: int, module: nn.Module, whole: nn.Module) -> dict[str, Tensor]:
    """Enters what is found, and returns the gradients of the reference."""
    ids = hf_ids(rank, 2, 8 + rank)
    got, want = module(input_ids=ids.to("npu")).logits, whole(input_ids=ids).logits
    _loss(got, ids.to("npu")).backward()
    _loss(want, ids).backward()
    errors = (got.detach().cpu().float() - want.detach()).norm(dim=-1) / want.detach().norm(dim=-1)
    findings.tokens[name] = float(errors.max())
    expected = averaged_gradients(whole)
    findings.gradients[name] = {n: relative_error(_host(p.grad), expected[n]) for n, p in module.named_parameters()}
    for model in (module, whole):
        model.zero_grad()
    return expected


def _train(findings: Findings, rank: int, module: nn.Module, whole: nn.Module) -> None:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in (module, whole)]
    for step in range(STEPS):
        ids = hf_ids(rank + 4 * step, 2, 8)
        got = _loss(module(input_ids=ids.to("npu")).logits, ids.to("npu"))
        want = _loss(whole(input_ids=ids).logits, ids)
        got.backward()
        want.backward()
        for parameter, gradient in zip(whole.parameters(), averaged_gradients(whole).values(), strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        findings.losses.append(relative_error(got.cpu(), want))
    expected = dict(whole.named_parameters())
    findings.parameters = {n: relative_error(_host(p), expected[n]) for n, p in module.named_parameters()}


def _host(tensor: Any) -> Tensor:
    return full(tensor).detach().cpu().float()
