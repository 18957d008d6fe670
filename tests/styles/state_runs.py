"""One rank's runs of a styled layer, in every order that a scheduler could choose; what they leave behind."""
from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ep_fx
from ep_fx.styles import combine, dispatch
from ep_fx.styles.forward import local_view
from tests.models.moe import MoE
from tests.models.tiny_moe import Router, SwiGLUExperts
from tests.oracle import relative_error
from tests.requirements.reg1_cases import DIM, HIDDEN, loss_of
from tests.requirements.test_state_safety import ContextSpy
from tests.styles.nestings import made, own_mesh

LENGTHS = (9, 5)
FSDP = "style on the MoE, then FSDP on it"
PLANS = {"style alone": {"ep": 4}, FSDP: {"fsdp": 2, "ep": 2}}
ALONE = ["F0", "B0", "F1", "B1"]
ORDERS = {"F0 F1 B0 B1": ["F0", "F1", "B0", "B1"], "F0 F1 B1 B0": ["F0", "F1", "B1", "B0"]}


class Turns:
    """Steps that several threads do in an agreed order."""

    def __init__(self, order: Sequence[str]) -> None:
        self.left, self.changed = list(order), threading.Condition()

    def begin(self, step: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.left[0] == step, timeout=20), f"{step} never had its turn"

    def end(self, step: str) -> None:
        with self.changed:
            assert self.left.pop(0) == step
            self.changed.notify_all()


class Turning(SwiGLUExperts):
    """Experts that let others have their turn between dispatch and combine."""

    turns: Turns | None = None

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, scores: Tensor | None = None) -> Tensor:
        name = threading.current_thread().name
        if self.turns is not None:
            self.turns.end(f"dispatch {name}")
            self.turns.begin(f"combine {name}")
        return super().forward(x, num_tokens_per_expert, scores)


def make_layer() -> MoE:
    """The same weights in every process; scores go through the experts, so they travel too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MoE(Router(DIM, 4), Turning(4, DIM, HIDDEN), top_k=2, scores="positional")


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of different lengths: tokens and targets."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [tuple(torch.randn(2, 1, n, DIM, generator=generator).unbind()) for n in LENGTHS]  # type: ignore[misc]


class Microbatch:
    """One micro-batch's forward and backward, to be called in any order."""

    def __init__(self, module: nn.Module, tokens: Tensor, target: Tensor) -> None:
        self.module, self.tokens, self.target = module, tokens.clone().requires_grad_(), target

    def forward(self) -> None:
        self.y = self.module(self.tokens)

    def backward(self) -> None:
        loss_of(self.y, self.target).backward()

    def step(self, name: str) -> None:
        self.forward() if name == "F" else self.backward()

    def differs(self, other: Microbatch) -> list[str]:
        """What is not bit for bit the same in `other`."""
        assert self.tokens.grad is not None
        assert other.tokens.grad is not None
        wrong = [] if torch.equal(self.y, other.y) else ["output"]
        return wrong + ([] if torch.equal(self.tokens.grad, other.tokens.grad) else ["gradient of the input"])


Runs = list[Microbatch]


def _totals(module: nn.Module) -> dict[str, Tensor]:
    """Gradients of both micro-batches together, whole."""
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g.clone()) for n, g in grads.items() if g is not None}


def interleavings(rank: int, nesting: str) -> dict[str, list[str]]:
    """For each way to run two micro-batches, what differs from running each alone."""
    mesh = own_mesh(**PLANS[nesting])
    module = made(nesting, make_layer(), mesh)
    data = batches(rank)
    ways: dict[str, Callable[[], Runs]] = {
        name: partial(_in_order, module, data, order) for name, order in {"alone": ALONE, **ORDERS}.items()
    }
    if nesting == "style alone":
        ways["two threads, between dispatch and combine"] = lambda: _in_threads(module, data)
    found, solo = {}, None
    for name, way in ways.items():
        module.zero_grad()
        runs, totals = way(), _totals(module)
        solo = solo or (runs, totals)
        found[name] = [fault for mine, its in zip(runs, solo[0], strict=True) for fault in mine.differs(its)]
        found[name] += [n for n, total in solo[1].items() if relative_error(totals[n], total) > 1e-6]
    assert solo is not None
    assert len(solo[1]) == 4
    if nesting == "style alone":
        found["plain functions"] = _by_functions(module, data)
    return found


def _in_order(module: nn.Module, data: Sequence[tuple[Tensor, Tensor]], order: Sequence[str]) -> Runs:
    runs = [Microbatch(module, *one) for one in data]
    for kind, index in order:
        runs[int(index)].step(kind)
    return runs


def _in_threads(module: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> Runs:
    runs = [Microbatch(module, *one) for one in data]
    steps = ("dispatch 0", "dispatch 1", "combine 0", "combine 1", "backward 1", "backward 0")
    turns, failures = Turns(steps), []
    module.experts.turns = turns

    def work(index: int) -> None:
        try:
            turns.begin(f"dispatch {index}")
            runs[index].forward()
            turns.end(f"combine {index}")
            turns.begin(f"backward {index}")
            runs[index].backward()
            turns.end(f"backward {index}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,), name=str(index)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    module.experts.turns = None
    if failures:
        raise failures[0]
    return runs


def _by_functions(module: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> list[str]:
    """dispatch 0, dispatch 1, combine 0, combine 1 of the experts, against two ordinary calls."""
    experts, mesh = module.experts, own_mesh(**PLANS["style alone"])
    rows = [tokens[0] for tokens, _ in data]
    calls = [(x, torch.tensor([3, 0, len(x) - 4, 1]), torch.linspace(0.1, 1, len(x))) for x in rows]
    want = [experts(*call) for call in calls]
    sent = [dispatch(experts, mesh, *call) for call in calls]
    with local_view(experts, 1.0, {}) as local:
        outputs = [type(experts).forward(local, *routed) for *routed, _ in sent]
    got = [combine(experts, y, one[-1], mesh) for y, one in zip(outputs, sent, strict=True)]
    return [f"{index}" for index, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]


# -- what stays --------------------------------------------------------------------------------------------------------
def lifetimes(rank: int, nesting: str) -> dict[str, list[int]]:
    """Uses of the context in forward, how many of them are alive after it, and at the end, for each kind of run."""
    module = made(nesting, make_layer(), own_mesh(**PLANS[nesting]))
    tokens, target = batches(rank)[0]
    found = {}
    for name in ("train", "dropped loss", "no grad"):
        with ContextSpy() as spy, torch.set_grad_enabled(name != "no grad"):
            y = module(tokens)
            loss = loss_of(y, target)
        uses, after_forward = len(spy.storages), spy.alive
        if name == "train":
            loss.backward()  # output and loss are kept, as a user may
        else:
            y, loss = y.detach(), loss.detach()
        found[name] = [uses, after_forward, spy.alive, spy.objects]
    return found


def _snapshot(value: Any) -> Any:
    if isinstance(value, dict):
        return {repr(key): id(item) for key, item in value.items()}
    return [id(item) for item in value] if isinstance(value, (list, set, tuple)) else id(value)


def everything_that_lasts(module: nn.Module, style: Any) -> dict[str, Any]:
    """Every attribute of every module and parameter, of the style, and every global of the styles."""
    owners: dict[str, Any] = {f"module {path}": part.__dict__ for path, part in module.named_modules()}
    owners |= {f"parameter {name}": p.__dict__ for name, p in module.named_parameters()}
    owners |= {f"hooks of {name}": {"b": p._backward_hooks or {}} for name, p in module.named_parameters()}
    owners |= {name: vars(m) for name, m in list(sys.modules.items()) if name.startswith("ep_fx.styles")}
    owners["style"] = vars(style)
    return {f"{owner}.{name}": _snapshot(v) for owner, names in owners.items() for name, v in names.items()}


def state(rank: int) -> dict[str, Any]:
    """What a run leaves behind, and what callers see."""
    layer, style, (tokens, target) = make_layer(), ep_fx.ExpertParallel(), batches(rank)[0]
    before_apply = _seen_by_callers(layer)
    module = style.apply(layer, own_mesh(**PLANS["style alone"]))
    runs = []
    for _ in range(3):  # the first finds the parameters whose gradients it must average
        loss_of(module(tokens), target).backward()
        module.zero_grad()
        runs.append(everything_that_lasts(module, style))
    return {
        "changed": [n for n in runs[1].keys() | runs[2].keys() if runs[1].get(n) != runs[2].get(n)],
        "watched": len(runs[1]),
        "same module": module is layer,
        "seen by callers": _seen_by_callers(layer) == before_apply,
        "hooks": sum(len(getattr(m, name)) for m in module.modules() for name in HOOKS),
    }


HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name]


def _seen_by_callers(layer: nn.Module) -> list[Any]:
    parts = [layer, layer.experts]
    return [
        *(type(part) for part in parts),
        *(inspect.signature(part.forward) for part in parts),
        *(type(part).forward for part in parts),
        [name for name, _ in layer.named_parameters()],
        list(layer.state_dict()),
        [tuple(p.shape) for p in layer.parameters()],
    ]
