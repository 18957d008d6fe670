"""Lists of experts in a model become stacked modules, if it is proven what their parents do with them.

    moe.experts = ModuleList[8 x MLP]   ->   moe.experts = StackedExperts       (undone where transform then fails)

A list is looked at where its name says "expert", or where another parameter of its parent counts as many as it has
modules, as a router's does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ep_fx.capture.experts.base import where
from ep_fx.capture.experts.module_list.proof import NotProven, Proof, prove
from ep_fx.capture.experts.module_list.stacked import Stack, StackedExperts, difference

_LARGE = 100_000_000
"""A parent with more weights than this outside its list is a model around layers, and not worth a trial."""
STACKED = "stacked"
"""Name of the experts in a registered class that is a list or a dictionary of modules itself."""


@dataclass
class Stacking:
    """What was done to a model.

    Args:
        stacks: each stacked parameter by its new name.
        reasons: why a list of experts was left as it is, by module path.
        replaced: each changed parent, and the submodules it had.
    """

    stacks: dict[str, Stack] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    replaced: list[tuple[nn.Module, dict[str, nn.Module | None]]] = field(default_factory=list)

    def undo(self) -> None:
        """Gives the model its lists back."""
        for parent, modules in reversed(self.replaced):
            parent._modules.clear()
            parent._modules.update(modules)
        self.replaced.clear()


@dataclass(frozen=True)
class Recognised:
    """Kept on a `StackedExperts` whose parent's forward is proven."""

    parent: nn.Module
    proof: Proof


def stack_lists(model: nn.Module, is_registered: Callable[[nn.Module], bool]) -> Stacking:
    """Replaces the lists of experts in `model`.

    Args:
        is_registered: whether the user said how to trace a module; its lists of experts are stacked without a proof.
    """
    done, known = Stacking(), dict[Any, Proof | str]()
    for path, parent in list(model.named_modules()):
        if is_registered(parent) and isinstance(parent, (nn.ModuleList, nn.ModuleDict)):
            _stack_children(done, parent, path)
            continue
        for attribute, experts in list(parent._modules.items()):
            if type(experts) is not nn.ModuleList or len(experts) < 2:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if is_registered(parent):
                if _is_named(attribute) and difference(list(experts)) is None:
                    _stack(done, parent, attribute, name, None)
                continue
            if not (_is_named(attribute) or _is_counted(parent, experts)):
                continue
            outcome = _outcome(model, parent, attribute, known)
            if isinstance(outcome, Proof):
                _stack(done, parent, attribute, name, outcome)
            elif _is_named(attribute):
                done.reasons[name] = f"{name} ({where(parent)}): {outcome}"
    return done


def _outcome(model: nn.Module, parent: nn.Module, attribute: str, known: dict[Any, Proof | str]) -> Proof | str:
    """The proof for one list, or why there is none; layers of one kind are proven once."""
    experts: Any = parent._modules[attribute]
    if sum(child is experts for module in model.modules() for child in module._modules.values()) > 1:
        return "this list belongs to several modules"
    if reason := difference(list(experts)):
        return reason
    key = (type(parent), attribute, repr(parent), tuple(_facts(parent, experts)))
    if key not in known:
        try:
            known[key] = prove(parent, attribute)
        except NotProven as error:
            known[key] = str(error)
    return known[key]


def _facts(parent: nn.Module, experts: nn.Module | None) -> Iterator[tuple[Any, ...]]:
    """Everything that may change what the parent's forward computes, weights apart."""
    inside = {id(module) for module in experts.modules()} if experts is not None else set()
    for path, module in parent.named_modules():
        if id(module) in inside:
            continue
        for name, p in (*module._parameters.items(), *module._buffers.items()):
            yield path, name, None if p is None else (tuple(p.shape), p.dtype)
        for name, value in module.__dict__.items():
            if name not in _OF_EVERY_MODULE:
                is_plain = isinstance(value, (int, float, str, bool, type(None)))
                yield path, name, value if is_plain else id(value)


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def _is_named(attribute: str) -> bool:
    return "expert" in attribute.lower() and "shared" not in attribute.lower()


def _is_counted(parent: nn.Module, experts: nn.Module) -> bool:
    """Whether the parent has a matrix, outside the list, with one row or column for each of its modules."""
    inside = {id(p) for p in experts.parameters()}
    outside = [p for p in parent.parameters() if id(p) not in inside]
    number = len(experts)  # type: ignore[arg-type]
    if sum(p.numel() for p in outside) > _LARGE:
        return False
    return any(p.dim() == 2 and number in p.shape for p in outside)


def _stack_children(done: Stacking, parent: nn.Module, path: str) -> None:
    """The experts among the children of `parent`, those of the first one's class, become its child `STACKED`."""
    before = dict(parent._modules)
    children = {name: child for name, child in before.items() if type(child) is type(next(iter(before.values())))}
    experts: Any = list(children.values())
    if len(experts) < 2 or difference(experts) is not None:
        return
    names = [f"{path}.{name}" if path else name for name in children]
    stacked = _stacked(done, experts, names, f"{path}.{STACKED}" if path else STACKED, parent)
    done.replaced.append((parent, before))
    parent._modules.clear()
    parent._modules.update({STACKED: stacked, **{n: child for n, child in before.items() if n not in children}})


def _stack(done: Stacking, parent: nn.Module, attribute: str, name: str, proof: Proof | None) -> None:
    experts: Any = parent._modules[attribute]
    names = [f"{name}.{number}" for number in range(len(experts))]
    stacked = _stacked(done, list(experts), names, name, parent)
    if proof is not None:
        object.__setattr__(stacked, "recognised", Recognised(parent, proof))
    done.replaced.append((parent, dict(parent._modules)))
    parent._modules[attribute] = stacked


def _stacked(
    done: Stacking, experts: list[nn.Module], paths: list[str], name: str, parent: nn.Module
) -> StackedExperts:
    """The module in the place `name` for `experts`, which stood at `paths`."""
    for leaf, _ in experts[0].named_parameters():
        names = tuple(f"{path}.{leaf}" for path in paths)
        done.stacks[f"{name}.{leaf}"] = Stack(names, [expert.get_parameter(leaf) for expert in experts])
    return StackedExperts(experts, f"{name} ({where(parent)})")
