"""What a mutation operator is: a name, a sentence, and a function that breaks a valid graph.

    @operator("drop-reshard", "a gathered unit is never freed")
    def drop_reshard(graph, rng):
        reshard = choose(rng, graph.nodes(Role.RESHARD))        # None where there is none
        if reshard is None:
            return None                                         # does not apply to this graph
        graph.graph.erase_node(reshard)
        return graph

The function is given a copy of its own, edits it in place and returns it, or returns None. Whoever calls the operator
gets an edited copy; an edit after which fx refuses the graph counts as not applicable.
"""
from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from ep_fx.graph import ParallelGraph

T = TypeVar("T")
Edit = Callable[[ParallelGraph, random.Random], ParallelGraph | None]


@dataclass(frozen=True)
class Operator:
    """One way to break a graph.

    Args:
        name: short name, unique in the package.
        sentence: what is wrong afterwards.
        family: last part of the module that defines it.
        edit: edits the copy that it is given, or returns None.
        ranks: the ranks whose graph is edited; None: all of them.
    """

    name: str
    sentence: str
    family: str
    edit: Edit
    ranks: tuple[int, ...] | None = None

    def __call__(self, graph: ParallelGraph, rng: random.Random) -> ParallelGraph | None:
        """An edited copy of `graph`; None where the operator does not apply. `graph` itself stays as it is."""
        edited = self.edit(graph.copy(), rng)
        if edited is None:
            return None
        try:
            edited.graph.lint()
        except RuntimeError:  # e.g. a node was moved before what it reads
            return None
        return edited


def operator(name: str, sentence: str, *, ranks: tuple[int, ...] | None = None) -> Callable[[Edit], Operator]:
    """Makes an operator of the decorated function.

    Args:
        ranks: ranks whose graph is edited while the others keep the valid one; None: all.
    """
    return lambda edit: Operator(name, sentence, edit.__module__.rpartition(".")[2], edit, ranks)


def operators(*, families: str = "") -> dict[str, Operator]:
    """All operators that modules of this package define at their top, by name.

    Args:
        families: only modules whose name starts so.

    Raises:
        ValueError: two operators share a name.
    """
    package = __name__.rpartition(".")[0]
    found: dict[str, Operator] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)):
        if not module.startswith(families):
            continue
        for value in vars(importlib.import_module(f"{package}.{module}")).values():
            if isinstance(value, Operator) and value.family == module:
                if value.name in found:
                    raise ValueError(f"{found[value.name].family} and {module} both define operator {value.name!r}")
                found[value.name] = value
    return found


# -- what many operators need --------------------------------------------------------------------------------------
def choose(rng: random.Random, items: Sequence[T]) -> T | None:
    """One of `items`, None where there is none."""
    return rng.choice(items) if items else None


def replace_argument(node: fx.Node, position: int, value: Any) -> None:
    """Sets one positional argument."""
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


def erase(node: fx.Node, instead: fx.Node) -> None:
    """Removes a node; its users read `instead`."""
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def set_gradient(graph: ParallelGraph, name: str, value: Any) -> None:
    """Returns `value` as the gradient of the parameter `name`."""
    graph.set_gradients({name: value})
