"""The user's inputs: which dimensions are dynamic, the fake tensors that stand for them, and the guards at the call.

A dynamic dimension is not traced with its real size: each gets a hint, a prime; dimensions at the same place with the
same size share it, so ``ids [B, S]`` and ``labels [B, S]`` fit together (each has a symbol of its own; where the trace
relied on their being equal, a guard says so). Where a model demands more (a mask [B, 1, S, S]), stricter readings
follow, see `READINGS`. torch's symbols are never 1, so ``x.shape[1] == 1`` leaves no guard: a size of 1 is a constant
of the trace, and part of the structure that a trace is for. A size of 0 is served like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
Key = Callable[[torch.Tensor, int], Hashable | None]


def _by_place(tensor: torch.Tensor, dim: int) -> Hashable | None:
    """All dimensions dynamic, but the last of a floating tensor (features); equal when place and size are equal."""
    if tensor.is_floating_point() and dim == tensor.dim() - 1 and dim > 0:
        return None
    return dim, tensor.shape[dim]


def _by_size(tensor: torch.Tensor, dim: int) -> Hashable | None:
    """As before, but equal sizes are equal wherever they stand, and an inner dimension of size 1 stays 1."""
    if (dim > 0 and tensor.shape[dim] == 1) or (tensor.is_floating_point() and dim == tensor.dim() - 1 and dim > 0):
        return None
    return tensor.shape[dim] if dim > 0 else ("batch", tensor.shape[0])


def _batch_only(tensor: torch.Tensor, dim: int) -> Hashable | None:
    """Only dim 0 is dynamic."""
    return tensor.shape[0] if dim == 0 else None


def _nothing(tensor: torch.Tensor, dim: int) -> Hashable | None:
    return None


READINGS: tuple[Key, ...] = (_by_place, _by_size, _batch_only, _nothing)
"""Ways to read the dimensions, most dynamic first; capture takes the first with which the model can be traced."""
STATIC: Key = _nothing


class Sizes(Enum):
    """With which sizes dynamic dimensions are traced; the later ones are for models that the earlier do not serve."""

    HINTS = "made up, then real"
    REAL = "real, 0 apart"
    FIXED = "real, and constants of the trace"


@dataclass
class Inputs:
    """The flattened inputs of one call: tensors apart from constants."""

    spec: pytree.TreeSpec
    leaves: list[Any]
    tensors: list[torch.Tensor]
    paths: list[str]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Flattens a call."""
        with_paths, spec = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in with_paths]
        paths = [_readable(path) for path, leaf in with_paths if isinstance(leaf, torch.Tensor)]
        return cls(spec, leaves, [x for x in leaves if isinstance(x, torch.Tensor)], paths)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call again, with `tensors` in place of its tensors."""
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @property
    def structure(self) -> Hashable:
        """Equal for two calls that one capture can serve, sizes other than 1 apart."""
        constants = tuple(repr(x) for x in self.leaves if not isinstance(x, torch.Tensor))
        tensors = tuple(
            (x.dtype, x.device.type, x.requires_grad, tuple(size == 1 for size in x.shape)) for x in self.tensors
        )
        return self.spec, constants, tensors


def _readable(path: Sequence[Any]) -> str:
    """``args[0]`` or ``attention_mask`` rather than the pytree's own key path."""
    first, *rest = (getattr(key, "idx", getattr(key, "key", key)) for key in path)
    if first == 1 and rest:
        return "".join([str(rest[0]), *(f"[{key!r}]" for key in rest[1:])])
    return "args" + "".join(f"[{key!r}]" for key in rest)


@dataclass
class Guards:
    """What one capture assumes about the sizes of its inputs; anything else is free.

    Args:
        paths: name of each input tensor.
        symbols: ``(input, dimension)`` of each symbol.
        static: sizes that were traced as constants, by ``(input, dimension)``.
        relations: relations between symbols that the trace relied on.
    """

    paths: list[str]
    symbols: dict[sympy.Symbol, tuple[int, int]]
    static: dict[tuple[int, int], int]
    relations: list[Any]
    _verdicts: dict[Hashable, str | None] = field(default_factory=dict, repr=False)

    def violation(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """The first assumption that `tensors` break, in words; None where all hold."""
        sizes = tuple(tuple(x.shape) for x in tensors)
        if sizes not in self._verdicts:
            if len(self._verdicts) > 1024:
                self._verdicts.clear()
            self._verdicts[sizes] = self._judge(sizes)
        return self._verdicts[sizes]

    def _judge(self, sizes: tuple[tuple[int, ...], ...]) -> str | None:
        for (tensor, dim), want in self.static.items():
            if sizes[tensor][dim] != want:
                return f"{self.paths[tensor]}.shape[{dim}] was {want} at capture and is {sizes[tensor][dim]}"
        values = {symbol: sizes[t][d] for symbol, (t, d) in self.symbols.items()}
        for relation in self.relations:
            if not relation.xreplace({s: sympy.Integer(v) for s, v in values.items()}):
                return f"{self.describe(relation)} does not hold for shapes {dict(zip(self.paths, sizes, strict=True))}"
        return None

    def describe(self, relation: Any) -> str:
        """`relation` in terms of the inputs' shapes."""
        names = {s: sympy.Symbol(f"{self.paths[t]}.shape[{d}]") for s, (t, d) in self.symbols.items()}
        return str(relation.xreplace(names))


def fake_inputs(
    inputs: Inputs, device: torch.device, mode: FakeTensorMode, key: Key, real_sizes: bool
) -> tuple[list[torch.Tensor], dict[sympy.Symbol, tuple[int, int]], dict[tuple[int, int], int]]:
    """Fake tensors for the inputs' tensors, the place of each symbol, and the static sizes.

    Args:
        device: device of the fake tensors.
        key: how to read the dimensions.
        real_sizes: hint with the real sizes, 0 apart (after a guard on smaller hints failed).
    """
    hints: dict[Hashable, int] = {}
    fakes: list[torch.Tensor] = []
    symbols: dict[sympy.Symbol, tuple[int, int]] = {}
    static: dict[tuple[int, int], int] = {}
    for index, tensor in enumerate(inputs.tensors):
        sizes: list[int] = []
        dynamic: list[DimDynamic] = []
        for dim, size in enumerate(tensor.shape):
            name = key(tensor, dim)
            if name is None or size == 1:
                static[index, dim] = size
                sizes.append(size)
                dynamic.append(DimDynamic.STATIC)
                continue
            hint = hints.setdefault(name, size if real_sizes and size >= 2 else _PRIMES[len(hints) % len(_PRIMES)])
            sizes.append(hint)
            dynamic.append(DimDynamic.DYNAMIC)
        model = torch.empty(sizes, dtype=tensor.dtype, device=device)
        fake = mode.from_tensor(model, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
        if tensor.requires_grad:
            fake.requires_grad_(True)
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = (index, dim)
        fakes.append(fake)
    return fakes, symbols, static


def relations_of(env: ShapeEnv, symbols: dict[sympy.Symbol, tuple[int, int]]) -> list[Any]:
    """The guards that the trace left, over the inputs' symbols only, each once."""
    found: dict[str, Any] = {}
    for guard in env.guards:
        if guard.expr.free_symbols and guard.expr.free_symbols <= set(symbols):
            found.setdefault(str(guard.expr), guard.expr)
    return list(found.values())
