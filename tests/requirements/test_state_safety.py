"""State safety, ST-1 to ST-7, SS-01 and SS-02: what dispatch knows lives in the call and nowhere else."""
from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ep_fx
from ep_fx import EPModule
from ep_fx.graph import Phase, Role, alias_root, find_regions, role_of
from ep_fx.graph.effects import written_by
from ep_fx.testing import RankPools, local_mesh
from tests.interleave import interleaved_forwards
from tests.models.moe import MoE
from tests.models.tiny_moe import TinyMoE, token_ids

LENGTHS = (8, 5)
WORLDS: dict[int, dict[str, int]] = {1: {"fsdp": 1, "ep": 1}, 4: {"fsdp": 2, "ep": 2}}
ORDERS = {
    "F0 F1 B0 B1": [("F", 0), ("F", 1), ("B", 0), ("B", 1)],
    "F0 F1 B1 B0": [("F", 0), ("F", 1), ("B", 1), ("B", 0)],
}
LASTING = ("placeholder", "get_attr")  # kinds of nodes whose memory outlives a run


def make_model() -> TinyMoE:
    """One block of everything."""
    return TinyMoE(blocks=1, shared=True, grouped=True)


def batches(rank: int) -> list[Tensor]:
    """Micro-batches of different lengths and routing."""
    return [token_ids(rank + 10 * index, length=length) for index, length in enumerate(LENGTHS)]


def loss_of(logits: Tensor) -> Tensor:
    """Different for every token, so that tokens that change places are noticed."""
    weights = torch.arange(1.0, logits.numel() + 1).view(logits.shape) / logits.numel()
    return (logits.square() * weights).mean()


# -- SS-01 -------------------------------------------------------------------------------------------------------------
class Microbatch:
    """One micro-batch's forward and backward, to be called in any order."""

    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        self.module, self.ids = module, ids

    def forward(self) -> None:
        self.logits = self.module(self.ids)

    def backward(self) -> None:
        found = torch.autograd.grad(loss_of(self.logits), list(self.module.parameters()))
        self.gradients = [g.to_local() for g in found]  # type: ignore[attr-defined]

    def step(self, kind: str) -> None:
        self.forward() if kind == "F" else self.backward()

    def differs(self, other: Microbatch) -> list[str]:
        """What is not bit for bit the same in `other`."""
        wrong = [] if torch.equal(self.logits, other.logits) else ["logits"]
        pairs = zip(self.gradients, other.gradients, strict=True)
        return wrong + [f"gradient {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


def interleavings(rank: int, world: int) -> dict[str, list[str]]:
    """For each way to run two micro-batches, what differs from running each alone."""
    module = ep_fx.transform(make_model(), local_mesh(**WORLDS[world]))
    alone = [Microbatch(module, ids) for ids in batches(rank)]
    for run in alone:
        run.forward()
        run.backward()
    found = {name: _differences(_in_order(module, rank, order), alone) for name, order in ORDERS.items()}
    with_turns = _in_threads(module, rank, ORDERS["F0 F1 B1 B0"])
    found["two threads, turns taken in the same order on every rank"] = _differences(with_turns, alone)
    if world == 1:
        runs = [_in_threads(module, rank, None) for _ in range(10)]
        found["two threads in any order"] = [fault for run in runs for fault in _differences(run, alone)]
    outputs, reached = interleaved_forwards(module, [(ids,) for ids in batches(rank)])
    found[" ".join(reached)] = [
        f"logits {i}" for i, (y, run) in enumerate(zip(outputs, alone, strict=True)) if not torch.equal(y, run.logits)
    ]
    return found


def _differences(runs: Sequence[Microbatch], alone: Sequence[Microbatch]) -> list[str]:
    return [f"{index}: {fault}" for index, run in enumerate(runs) for fault in run.differs(alone[index])]


def _in_order(module: EPModule, rank: int, order: Sequence[tuple[str, int]]) -> list[Microbatch]:
    runs = [Microbatch(module, ids) for ids in batches(rank)]
    for kind, index in order:
        runs[index].step(kind)
    return runs


def _in_threads(module: EPModule, rank: int, order: Sequence[tuple[str, int]] | None) -> list[Microbatch]:
    """Each micro-batch in a thread of its own; with `order` they take turns."""
    runs = [Microbatch(module, ids) for ids in batches(rank)]
    turn, changed, failures = iter(order or ()), threading.Condition(), []
    now = [next(turn, None)]

    def work(index: int) -> None:
        try:
            for kind in "FB":
                if order is None:
                    runs[index].step(kind)
                    continue
                with changed:
                    assert changed.wait_for(partial(_is_turn, now, (kind, index)), timeout=30)
                    runs[index].step(kind)
                    now[0] = next(turn, None)
                    changed.notify_all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if failures:
        raise failures[0]
    return runs


def _is_turn(now: list[tuple[str, int] | None], step: tuple[str, int]) -> bool:
    return now[0] == step


@pytest.mark.parametrize("world", WORLDS)
def test_ss_01_micro_batches_that_interleave_equal_their_solo_runs(ranks: RankPools, world: int) -> None:
    for found in ranks(world).run(interleavings, world):
        assert "dispatch 0 dispatch 1 combine 0 combine 1" in found
        assert len(found) == (5 if world == 1 else 4)
        assert all(faults == [] for faults in found.values()), found


# -- SS-02 -------------------------------------------------------------------------------------------------------------
class ContextSpy(TorchDispatchMode):
    """Weak references to the ``permuted_indices`` of every context that an exchange uses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[weakref.ref[Tensor]] = []
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.ep_fx.regroup.default:
            self.tensors.append(weakref.ref(args[1]))
            self.storages.append(StorageWeakRef(args[1].untyped_storage()))
        return func(*args, **(kwargs or {}))

    @property
    def alive(self) -> int:
        """Contexts that something still holds."""
        gc.collect()
        return sum(not ref.expired() for ref in self.storages)

    @property
    def objects(self) -> int:
        """Tensor objects that something still holds."""
        gc.collect()
        return sum(ref() is not None for ref in self.tensors)


def lifetimes(rank: int) -> dict[str, list[int]]:
    """Contexts made, alive after forward, and alive at the end, of each kind of run."""
    module = ep_fx.transform(make_model(), local_mesh(**WORLDS[4]))
    ids = batches(rank)[0]
    module(ids)
    with torch.no_grad():
        module(ids)
    found = {}
    for name, finish in {"train": _backward, "dropped loss": _drop, "no grad": None}.items():
        with ContextSpy() as spy, torch.set_grad_enabled(finish is not None):
            logits = module(ids)
        made, after_forward = len(spy.storages), spy.alive
        if finish is not None:
            with spy:
                finish(logits)
        if name != "dropped loss":
            kept = logits.detach()  # the user may keep what came out
            assert kept.isfinite().all()
        del logits
        found[name] = [made, after_forward, spy.alive, spy.objects]
    return found


def _backward(logits: Tensor) -> None:
    loss_of(logits).backward()


def _drop(logits: Tensor) -> None:
    loss = loss_of(logits)
    del loss


def test_ss_02_after_combine_and_backward_nothing_holds_the_context(ranks: RankPools) -> None:
    for found in ranks(4).run(lifetimes):
        assert found == {
            "train": [1, 1, 0, 0],  # [made, alive after forward, alive at the end, tensor objects at the end]
            "dropped loss": [1, 1, 0, 0],
            "no grad": [1, 0, 0, 0],
        }


# -- ST-1 to ST-7 ------------------------------------------------------------------------------------------------------
def _snapshot(value: Any) -> Any:
    """Identity of `value`, and of what it contains if it is a plain container."""
    if isinstance(value, dict):
        return {repr(key): id(item) for key, item in value.items()}
    if isinstance(value, (list, set, tuple)):
        return [id(item) for item in value]
    return id(value)


def everything_that_lasts(module: EPModule) -> dict[str, Any]:
    """Every attribute of every module, of the model behind them, and every global of ep_fx."""
    owners: dict[str, Any] = {f"module {path}": m.__dict__ for path, m in module.named_modules()}
    owners |= {f"model {path}": m.__dict__ for path, m in module._template.named_modules()}
    owners |= {f"global {name}": vars(m) for name, m in list(sys.modules.items()) if name.split(".")[0] == "ep_fx"}
    owners["style"] = vars(ep_fx.ExpertParallel())
    return {
        f"{owner}.{name}": _snapshot(value) for owner, names in owners.items() for name, value in names.items()
    }


def state(rank: int) -> dict[str, Any]:
    """What a run leaves behind, what the graph says about it, and what callers see."""
    model, ids = make_model(), batches(rank)[0]
    signature, forward = inspect.signature(model.forward), MoE.forward
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
    module = ep_fx.transform(model, local_mesh(**WORLDS[4]))
    loss_of(module(ids)).backward()
    for parameter in module.parameters():
        parameter.grad = None
    before = everything_that_lasts(module)
    loss_of(module(ids)).backward()
    for parameter in module.parameters():
        parameter.grad = None
    after = everything_that_lasts(module)
    return {
        "changed": [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)],
        "watched": len(before),
        "hooks": _hooks(module) + _hooks(module._template),
        "signature": inspect.signature(module.forward) == signature,
        "names": [n for n, _ in module.named_parameters()] == names,
        "keys": list(module.state_dict()) == keys,
        "MoE.forward": MoE.forward is forward,
        **_graph_facts(module),
    }


def _hooks(root: nn.Module) -> int:
    names = [name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name]
    return sum(len(getattr(module, name)) for module in root.modules() for name in names)


def _graph_facts(module: EPModule) -> dict[str, Any]:
    graph = module.graph
    (region,) = find_regions(graph)
    exchange = [n for members in region.members.values() for n in members]
    arguments = {a for n in exchange for a in n.all_input_nodes}
    combine = [n for n in region.members[Phase.FORWARD] if role_of(n) in (Role.UNGROUP, Role.PAD_ROWS)]
    context_edges = {a for n in combine for a in n.all_input_nodes if a.args[:1] == (region.source,)}
    return {
        "reads of attributes": [a.name for a in arguments if a.op == "get_attr"],
        "writes": [root.name for n in graph for w in written_by(n) for root in alias_root(w) if root.op in LASTING],
        "context of combine": sorted(int(e.args[1]) for e in context_edges),  # type: ignore[arg-type]
    }


@pytest.fixture(scope="module")
def states(ranks: RankPools) -> list[dict[str, Any]]:
    return ranks(4).run(state)


def test_st_1_a_run_changes_no_attribute_of_any_module_style_or_global(states: list[dict[str, Any]]) -> None:
    for facts in states:
        assert facts["watched"] > 500
        assert facts["changed"] == []


def test_st_2_dispatch_returns_its_context_and_st_4_combine_takes_it_from_there_alone(
    states: list[dict[str, Any]],
) -> None:
    for facts in states:
        assert facts["context of combine"] == [0, 3]  # permuted_indices and input_shape
        assert facts["reads of attributes"] == []
        assert facts["writes"] == []


def test_st_3_the_context_is_immutable_and_st_5_made_of_tensors_and_integers_only() -> None:
    counts = torch.tensor([2, 0, 1, 3])
    context = ep_fx.ops.dispatch_context(counts, counts, 6, 2, "experts")
    assert isinstance(context, tuple)
    assert {"permuted_indices", "input_splits", "output_splits", "input_shape"} <= set(context._fields)
    assert set(get_type_hints(type(context)).values()) == {Tensor, tuple[int, ...]}
    assert all(isinstance(leaf, (Tensor, int)) for leaf in pytree.tree_leaves(tuple(context)))
    with pytest.raises(AttributeError):
        context.input_splits = (6, 0)  # type: ignore[misc]
    assert not hasattr(context, "__dict__")


def test_st_6_no_hook_is_used_and_torchs_own_signatures_are_as_they_were(states: list[dict[str, Any]]) -> None:
    assert all(facts["hooks"] == 0 for facts in states)
    assert list(inspect.signature(distribute_module).parameters) == [
        "module", "device_mesh", "partition_fn", "input_fn", "output_fn",
    ]


def test_st_7_callers_see_the_same_signature_names_and_keys(states: list[dict[str, Any]]) -> None:
    for facts in states:
        assert facts["signature"]
        assert facts["names"]
        assert facts["keys"]
        assert facts["MoE.forward"]
