"""One rank's runs for the ways in which a module is transformed and used."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import CollectiveLog, local_mesh
from tests.models.hf import hf_ids, tiny_hf
from tests.models.moe import MoE
from tests.models.tiny_moe import Router, TinyMoE, next_token_loss, token_ids

M4 = {"fsdp": 2, "ep": 2}
DIM, HIDDEN, EXPERTS = 16, 32, 4


def whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    """The full gradient of every parameter that has one."""
    return {n: p.grad.full_tensor() for n, p in module.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


class Modal(TinyMoE):
    """TinyMoE whose forward differs between training and evaluation: halved logits, and dropout."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        if self.training:
            logits = logits / 2
        return nn.functional.dropout(logits, 0.5, self.training)


def modes(rank: int) -> dict[str, Any]:
    """Captures after each call, and what the calls gave."""
    twin, ids = Modal(blocks=1), token_ids(rank)
    module = ep_fx.transform(Modal(blocks=1), local_mesh(**M4))
    captures = [len(module.programs)]

    def call(train: bool, gradients: bool) -> Tensor:
        module.train(train)
        with torch.set_grad_enabled(gradients):
            y = module(ids)
        captures.append(len(module.programs))
        assert isinstance(y, Tensor)
        return y

    train, evaluated, silent = call(True, True), call(False, True), call(False, False)
    again, train_silent = call(True, True), call(True, False)
    backward = [p.backward is not None for p in module.programs]
    train.sum().backward()
    evaluated.sum().backward()
    whole, half = twin.eval()(ids), twin.eval()(ids) / 2
    kept = {name: train_y != 0 for name, train_y in (("train", train), ("again", again))}
    return {
        "captures": captures,
        "with backward": backward,
        "eval equals eager": torch.allclose(evaluated, whole, atol=1e-6) and torch.equal(evaluated, silent),
        "train is eager's, dropped and scaled": torch.allclose(train, 2 * half * kept["train"], atol=1e-6),
        "dropped": [0.3 < float(mask.float().mean()) < 0.7 for mask in kept.values()],
        "train varies": not torch.equal(kept["train"], kept["again"]),
        "requires_grad": [y.requires_grad for y in (train, evaluated, silent, train_silent)],
    }


def dense_on_purpose(rank: int) -> tuple[list[str], dict[str, Tensor], Tensor]:
    """A plan that splits nothing: the experts are sharded like everything else."""
    module = ep_fx.transform(TinyMoE(blocks=1), local_mesh(**M4), plan={})
    ids = token_ids(rank)
    with CollectiveLog() as log:
        logits = module(ids)
        next_token_loss(logits, ids).backward()
    return [e.op for e in log.events], whole_gradients(module), logits.detach()


class OwnExperts(nn.Module):
    """Experts of no known form: they take ids and weights, as a user may write them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        generator = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN, generator=generator) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM, generator=generator) * HIDDEN**-0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            y = y + share * (torch.relu(x @ self.up[expert]) @ self.down[expert])
        return y


def own_experts_by_moe(module: OwnExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same in terms of `ep_fx.moe`."""

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        inner = torch.relu(torch.ops.ep_fx.grouped_mm(rows, module.up, counts, None, False))
        result: Tensor = torch.ops.ep_fx.grouped_mm(inner, module.down, counts, None, False)
        return result

    return ep_fx.moe(x, ids, weights, experts, module.num_experts)


class OwnMoE(nn.Module):
    """A block around `OwnExperts`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.router = Router(DIM, EXPERTS)
        self.experts = OwnExperts()

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, ids, scores)


class GroupedMoE(nn.Module):
    """A block around `ep_fx.nn.GroupedExperts`, scores by keyword."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.moe = MoE(Router(DIM, EXPERTS), ep_fx.nn.GroupedExperts(DIM, HIDDEN, EXPERTS), 2, "keyword")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


def rows_of(rank: int) -> Tensor:
    """Tokens of one rank, [rank + 3, DIM], whose gradient is wanted."""
    return torch.randn(rank + 3, DIM, generator=torch.Generator().manual_seed(40 + rank)).requires_grad_()


def square(y: Tensor) -> Tensor:
    """A loss."""
    return y.square().mean()


def explicit_forms(rank: int) -> dict[str, tuple[Tensor, dict[str, Tensor], Tensor | None, int]]:
    """Output, gradients, gradient of the input, and number of exchanges of each explicit form."""
    ep_fx.register_experts(OwnExperts, own_experts_by_moe)
    found = {}
    for make in (OwnMoE, GroupedMoE):
        module = ep_fx.transform(make(), local_mesh(**M4))
        with CollectiveLog() as log:
            x = rows_of(rank)
            y = module(x)
            square(y).backward()
        found[make.__name__] = (y.detach(), whole_gradients(module), x.grad, len(log.of("all_to_all_single")))
    return found


def from_meta(rank: int) -> tuple[bool, Tensor, dict[str, Tensor], list[str]]:
    """A model on the meta device, filled after the transform with the original's full state."""
    state = TinyMoE(blocks=1).state_dict()
    with torch.device("meta"):
        model = TinyMoE(blocks=1)
    module = ep_fx.transform(model, local_mesh(**M4))
    module.prepare(token_ids(rank))  # a capture needs no weights
    on_meta = all(p.is_meta for p in module.parameters()) and module.verify().ok
    module.to_empty(device="cpu")
    result = module.load_state_dict(state)
    ids = token_ids(rank)
    logits = module(ids)
    next_token_loss(logits, ids).backward()
    return on_meta, logits.detach(), whole_gradients(module), [*result.missing_keys, *result.unexpected_keys]


def left_behind(rank: int) -> dict[str, Any]:
    """What a capture changed on the models that it traced."""
    changed: dict[str, Any] = {}
    mixtral = tiny_hf("mixtral", num_hidden_layers=1)
    for name, model, ids in (("TinyMoE", TinyMoE(blocks=1), token_ids(rank)), ("Mixtral", mixtral, hf_ids(rank))):
        config, implementations = repr(getattr(model, "config", None)), _implementations(model)
        before = {path: set(module.__dict__) for path, module in model.named_modules()}
        ep_fx.transform(model, local_mesh(**M4))(ids)
        changed[name] = {
            "attributes": [p for p, m in model.named_modules() if set(m.__dict__) != before[p]],
            "config": repr(getattr(model, "config", None)) == config,
            "implementation": _implementations(model) == implementations,
            "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
            "fake": [n for n, t in (*model.named_parameters(), *model.named_buffers()) if "Fake" in type(t).__name__],
            "real": [n for n, p in model.named_parameters() if not p.is_meta],
        }
    return changed


def _implementations(model: nn.Module) -> list[Any]:
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return [getattr(config, "_experts_implementation", None) for config in configs]
