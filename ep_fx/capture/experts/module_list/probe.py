"""A small copy of an MoE block in fp64 whose experts are known functions, and runs of it on many routings.

Expert e computes ``sin(a[e] x + b[e])``: it is not linear, so that a weight before an expert is no weight after it, and
it has a parameter, so that a lost gradient shows. All other weights are random; nothing of the model is touched.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_SHAPES = ((2, 12), (3, 7), (1, 1), (1, 256))
"""Tokens of a probe: two that hit many experts, one token, and many that are nearly equal and go one way."""


@dataclass(frozen=True)
class Case:
    """One probe.

    Args:
        tokens: batch and length.
        rank: dimensions of the input, 3: [B, S, D], 2: [B * S, D].
        training: mode.
        seed: of weights and tokens.
    """

    tokens: tuple[int, int]
    rank: int
    training: bool
    seed: int


def cases(rank: int) -> list[Case]:
    """Probes of one rank of the input, in both modes."""
    return [Case(tokens, rank, mode, seed) for seed, tokens in enumerate(_SHAPES) for mode in (True, False)]


class _Known(nn.Module):
    """Expert `number` of the known ones."""

    def __init__(self, known: KnownExperts, number: int) -> None:
        super().__init__()
        self.number = number
        object.__setattr__(self, "known", known)

    def forward(self, rows: Tensor) -> Tensor:
        known: Any = self.known
        return torch.sin(rows * known.a[self.number].to(rows.dtype) + known.b[self.number].to(rows.dtype))


class KnownExperts(nn.Module):
    """All known experts: as a list of modules (`listed`), and on rows in expert order."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(0.7, 1.6, number, dtype=torch.float64))
        self.b = nn.Parameter(torch.linspace(-1.0, 1.3, number, dtype=torch.float64))

    def listed(self) -> nn.ModuleList:
        """One module for each expert, sharing these parameters."""
        return nn.ModuleList(_Known(self, number) for number in range(len(self)))

    def __len__(self) -> int:
        return self.a.shape[0]

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """[R, D] in expert order to [R, D]."""
        expert = torch.repeat_interleave(tokens_per_expert)
        a, b = (x[expert].unsqueeze(1).to(rows.dtype) for x in (self.a, self.b))
        return torch.sin(rows * a + b)


@dataclass
class Result:
    """Tensors of the output by place, and the gradient of everything that can have one."""

    outputs: dict[str, Any]
    gradients: list[Tensor | None]


class Probe:
    """The copy of one block.

    Args:
        parent: the block.
        attribute: name of its list of experts.
        dim: features of a token.
        own_dtypes: keep the block's dtypes; else fp64.
    """

    def __init__(self, parent: nn.Module, attribute: str, dim: int, own_dtypes: bool = False) -> None:
        experts = getattr(parent, attribute)
        self.attribute, self.dim = attribute, dim
        self.dtype = next(experts[0].parameters()).dtype if own_dtypes else torch.float64
        self.known = KnownExperts(len(experts))
        self.listed = self.known.listed()
        memo: dict[int, Any] = {id(experts): self.listed}
        for parameter in _outside(parent, experts):
            value = torch.zeros(parameter.shape, dtype=parameter.dtype if own_dtypes else torch.float64)
            memo[id(parameter)] = nn.Parameter(value)
        for buffer in parent.buffers():
            memo[id(buffer)] = self._buffer(buffer, own_dtypes)
        self.block = copy.deepcopy(parent, memo).to("cpu")
        self.weights = [p for p in self.block.parameters() if p.is_floating_point()]

    @staticmethod
    def _buffer(buffer: Tensor, own_dtypes: bool) -> Tensor:
        value = torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.device.type == "meta" else buffer.detach().cpu()
        return value.clone() if own_dtypes or not value.is_floating_point() else value.double().clone()

    def run(
        self, case: Case, methods: Mapping[str, Callable[..., Any]], experts: nn.Module, attributes: Mapping[str, Any]
    ) -> Result:
        """One forward and backward, with `methods` in place of the block's own and `experts` as its experts.

        Args:
            attributes: set on the block meanwhile.
        """
        buffers = [b.clone() for b in self.block.buffers()]
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), self._with(methods, experts, attributes):
            torch.manual_seed(case.seed)
            x = self._fill(case)
            self.block.train(case.training)
            output = self.block(x.clone())  # so that it may be changed in place
            result = self._result(output, x)
        for buffer, before in zip(self.block.buffers(), buffers, strict=True):
            result.outputs[f"buffer {len(result.outputs)}"] = buffer.clone()
            buffer.copy_(before)
        return result

    def _fill(self, case: Case) -> Tensor:
        with torch.no_grad():
            for weight in self.weights:
                scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
                weight.copy_(torch.randn(weight.shape, dtype=torch.float64) * scale)
        x = torch.randn(*case.tokens, self.dim, dtype=torch.float64)
        if case.tokens[1] > 100:
            x = x[:, :1] + 1e-3 * x
        shape = (*case.tokens, self.dim) if case.rank == 3 else (-1, self.dim)
        return x.reshape(shape).to(self.dtype).requires_grad_()

    def _result(self, output: Any, x: Tensor) -> Result:
        leaves = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(output)[0]}
        roots = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.requires_grad]
        wanted = [x, *self.weights, *self.known.parameters()]
        if not roots:
            return Result(leaves, [None] * len(wanted))
        found = torch.autograd.grad(roots, wanted, [_cotangent(root) for root in roots], allow_unused=True)
        return Result({k: v.detach() if isinstance(v, Tensor) else v for k, v in leaves.items()}, list(found))

    @contextmanager
    def _with(
        self, methods: Mapping[str, Callable[..., Any]], experts: nn.Module, attributes: Mapping[str, Any]
    ) -> Iterator[None]:
        block = self.block
        block._modules[self.attribute] = experts
        for name, value in attributes.items():
            object.__setattr__(block, name, value)
        for name, method in methods.items():
            object.__setattr__(block, name, types.MethodType(method, block))
        try:
            yield
        finally:
            for name in (*methods, *attributes):
                block.__dict__.pop(name, None)
            block._modules[self.attribute] = self.listed


def _cotangent(like: Tensor) -> Tensor:
    return torch.cos(torch.arange(like.numel(), dtype=torch.float64)).reshape(like.shape).to(like.dtype)


def _outside(parent: nn.Module, experts: nn.Module) -> Iterator[nn.Parameter]:
    inside = {id(p) for p in experts.parameters()}
    return (p for p in parent.parameters() if id(p) not in inside)


def same(got: Result, want: Result, tol: float = 1e-5) -> str | None:
    """What differs, in words; None: nothing does."""
    if got.outputs.keys() != want.outputs.keys():
        return f"the output has {list(got.outputs)} instead of {list(want.outputs)}"
    for name, value in want.outputs.items():
        if not equal(got.outputs[name], value, tol):
            return f"output{name} differs"
    for number, (g, w) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        if not equal(_or_zero(g, w), _or_zero(w, g), tol):
            return "the gradient of the input differs" if number == 0 else "the gradient of a weight differs"
    return None


def _or_zero(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return torch.zeros_like(like) if gradient is None and like is not None else gradient


def equal(got: Any, want: Any, tol: float = 1e-5) -> bool:
    """Whether two values are the same to rounding; tensors in dtype and shape too."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return type(got) is type(want) and (not isinstance(want, (int, float, str, bool, tuple)) or got == want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm()) <= tol * float(want.norm()) + 1e-12


def block_dim(expert: nn.Module) -> int | None:
    """The number of features D for which one expert takes [n, D] to [n, D]; None: there is none."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta")) for p in expert.parameters()}
    empty = copy.deepcopy(expert, memo)
    dtype = next(expert.parameters()).dtype
    for dim in dict.fromkeys(size for p in expert.parameters() for size in reversed(p.shape)):
        try:
            y = empty(torch.empty(3, dim, dtype=dtype, device="meta"))
        except Exception:  # any: another number of features than the expert's own
            continue
        if isinstance(y, Tensor) and tuple(y.shape) == (3, dim):
            return dim
    return None


def rows_differ(experts: Sequence[nn.Module], stacked: Callable[[Sequence[nn.Module]], nn.Module], dim: int) -> bool:
    """Whether two experts, run as one on stacked parameters, give other rows or gradients than one by one."""
    one, two = (_small(experts[0], number) for number in range(2))
    both = stacked([one, two])
    for module in both.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(torch.empty(p.shape))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
            both.get_parameter(name).copy_(torch.stack([p, q]))
        torch.manual_seed(0)
        x = torch.randn(7, dim)
    with torch.enable_grad():
        want = torch.cat([one(x[:4]), two(x[4:])])
        got = both(x, torch.tensor([4, 3]))
        if not equal(got, want, 1e-4):
            return True
        cotangent = _cotangent(want)
        names = [name for name, _ in one.named_parameters()]
        wants = torch.autograd.grad(want, [*one.parameters(), *two.parameters()], cotangent, allow_unused=True)
        gots = torch.autograd.grad(got, [both.get_parameter(name) for name in names], cotangent, allow_unused=True)
    for index, g in enumerate(gots):
        for number, w in enumerate((wants[index], wants[index + len(names)])):
            if (g is None) != (w is None) or (g is not None and not equal(g[number], w, 1e-4)):
                return True
    return False


def _small(expert: nn.Module, number: int) -> nn.Module:
    """A copy in fp32, in eval mode, whose matrices are views of a short random vector."""
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(number)
    for p in expert.parameters():
        scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0
        source = torch.randn(sum(p.shape) + 1, generator=generator) * scale
        memo[id(p)] = nn.Parameter(source.as_strided(p.shape, [1] * p.dim()))
    return copy.deepcopy(expert, memo).eval()
