"""A small copy of an MoE block in fp64 whose experts are known functions, and runs of it on many routings.

Expert e computes ``scale[e] sin(a[e] asinh(x) + b[e])``: it is not linear, so that a weight before an expert is no
weight after it, has parameters, so that a lost gradient shows, and answers as well to tokens of any size. All other
weights are random; nothing of the model is touched.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ep_fx.capture.experts.module_list.compare import alike, equal
from ep_fx.capture.experts.module_list.trials import Case, Grad, answers, sized

_MODES: dict[Grad, Callable[[], AbstractContextManager[Any]]] = {
    "on": torch.enable_grad,
    "off": torch.no_grad,
    "inference": torch.inference_mode,
}


def _numeric_modes() -> tuple[Any, ...]:
    """The modes of torch that change what a linear computes."""
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return *autocast, torch.get_default_dtype(), torch.get_float32_matmul_precision()


class _Known(nn.Module):
    """Expert `number` of the known ones."""

    def __init__(self, known: KnownExperts, number: int) -> None:
        super().__init__()
        self.number = number
        object.__setattr__(self, "known", known)

    def forward(self, rows: Tensor) -> Tensor:
        known: Any = self.known
        if _numeric_modes() != known.modes:
            raise ValueError(
                "an expert is called in other modes of torch (autocast, default dtype, ...) than its parent"
            )
        a, b, scale = (x[self.number].to(rows.dtype) for x in (known.a, known.b, known.scale))
        answer: Tensor = scale * torch.sin(rows.asinh() * a + b)
        return answer


class KnownExperts(nn.Module):
    """All known experts: as a list of modules (`listed`), and on rows in expert order."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(0.7, 1.6, number, dtype=torch.float64))
        self.b = nn.Parameter(torch.linspace(-1.0, 1.3, number, dtype=torch.float64))
        self.scale = torch.ones(number, dtype=torch.float64)
        self.modes = _numeric_modes()

    def listed(self) -> nn.ModuleList:
        """One module for each expert, sharing these parameters."""
        return nn.ModuleList(_Known(self, number) for number in range(len(self)))

    def __len__(self) -> int:
        return self.a.shape[0]

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """[R, D] in expert order to [R, D]."""
        expert = torch.repeat_interleave(tokens_per_expert)
        a, b, scale = (x[expert].unsqueeze(1).to(rows.dtype) for x in (self.a, self.b, self.scale))
        return scale * torch.sin(rows.asinh() * a + b)


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
            self.known.modes = _numeric_modes()
            with _MODES[case.grad]():
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
                scale = scale * 50 if weight.dim() > 1 and case.kind == "sharp" else scale
                weight.copy_(torch.randn(weight.shape, dtype=torch.float64) * scale)
        self.known.scale = answers(case.kind, len(self.known))
        x = torch.randn(*case.tokens, self.dim, dtype=torch.float64)
        if case.tokens[1] > 100:
            x = x[:, :1] + 1e-3 * x
        x = sized(case.kind, x)
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


def same(got: Result, want: Result, tol: float = 1e-5, broken: bool = False) -> str | None:
    """What differs, in words; None: nothing does.

    Args:
        broken: experts answered with infinities; see `alike`, and gradients are none then.
    """
    if (reason := outputs_differ(got, want, tol, broken)) or broken:
        return reason
    for number, (g, w) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        if not equal(_or_zero(g, w), _or_zero(w, g), tol):
            return "the gradient of the input differs" if number == 0 else "the gradient of a weight differs"
    return None


def outputs_differ(got: Result, want: Result, tol: float, broken: bool) -> str | None:
    """The first output or buffer that differs, in words."""
    if got.outputs.keys() != want.outputs.keys():
        return f"the output has {list(got.outputs)} instead of {list(want.outputs)}"
    for name, value in want.outputs.items():
        if not alike(got.outputs[name], value, tol, broken):
            return f"output{name} differs"
    return None


def _or_zero(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return torch.zeros_like(like) if gradient is None and like is not None else gradient


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
