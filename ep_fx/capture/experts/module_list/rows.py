"""The forward of one expert, run once on the rows of all local experts: its parameters become stacks ``[E, ...]``.

    F.linear(x, w, b), x @ w, x @ w.t()      ->  grouped_mm(x, stack of w, tokens_per_expert, stack of b)
    x * w, x + w  with w [F]                 ->  the same with w of the expert of each row, [R, F]
    rms_norm, layer_norm                     ->  the norm without a weight, then as above

Everything that is done to no parameter stays as it is, and must be row by row. What else is done to a parameter is
refused: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Handler = Callable[..., Any]
_CASTS = frozenset({Tensor.to, Tensor.float, Tensor.double, Tensor.type, Tensor.type_as, Tensor.contiguous})
_SWAPS = frozenset({Tensor.t, Tensor.T.__get__, Tensor.mT.__get__})  # type: ignore[attr-defined]
_ADJOINT = frozenset({Tensor.transpose, Tensor.swapaxes, torch.transpose, torch.t})
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm})
_BY_ROW = frozenset(
    {
        torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__,
    }
)  # fmt: skip
_SHAPES = frozenset({Tensor.shape.__get__, Tensor.size, Tensor.dim, Tensor.ndim.__get__, Tensor.numel})  # type: ignore[attr-defined]
_FACTS = frozenset(
    {
        Tensor.dtype.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__, Tensor.is_floating_point,  # type: ignore[attr-defined]
        Tensor.is_cuda.__get__, Tensor.layout.__get__, Tensor.get_device,  # type: ignore[attr-defined]
    }
)  # fmt: skip


class RowsOfExperts(TorchFunctionMode):
    """While open, each of `stacks` stands for the parameter of the expert that a row belongs to.

    Args:
        stacks: parameters ``[E, ...]``.
        tokens_per_expert: [E]; rows are in expert order, and rows behind the last expert's give 0.

    Raises:
        ValueError: something is done to a parameter that has no form for many experts at once.
    """

    def __init__(self, stacks: Sequence[Tensor], tokens_per_expert: Tensor) -> None:
        super().__init__()
        self._stacks: dict[int, Tensor] = {id(stack): stack for stack in stacks}
        self._counts = tokens_per_expert
        self._experts: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if not any(self._is_stack(value) for value in _flat((*args, *named.values()))):
            return func(*args, **named)
        handler = self._handler(func)
        if handler is None:
            raise ValueError(
                f"an expert's forward applies {getattr(func, '__name__', func)} to a parameter, which has no form for "
                "the rows of several experts at once; accepted: linear, products with a matrix, sums and products with "
                "a vector, rms_norm, layer_norm"
            )
        return handler(func, *args, **named)

    def _handler(self, func: Callable[..., Any]) -> _Handler | None:
        table: tuple[tuple[frozenset[Any], _Handler], ...] = (
            (_SHAPES, self._shape),
            (_FACTS, lambda func, *args, **named: func(*args, **named)),
            (_CASTS, self._cast),
            (_SWAPS, lambda func, stack: self._known(stack.transpose(1, 2), stack, 2)),
            (_ADJOINT, self._adjoint),
            (frozenset({F.linear}), lambda func, x, weight, bias=None: self._product(x, weight, bias, True)),
            (_PRODUCTS, lambda func, x, weight: self._product(x, weight, None, False)),
            (frozenset({torch.addmm}), lambda func, bias, x, weight: self._product(x, weight, bias, False)),
            (_BY_ROW, self._by_row),
            (frozenset({F.rms_norm, torch.rms_norm, F.layer_norm, torch.layer_norm}), self._norm),
        )
        return next((handler for functions, handler in table if func in functions), None)

    def _is_stack(self, value: Any) -> bool:
        return id(value) in self._stacks

    def _known(self, result: Tensor, stack: Tensor, dims: int | None = None) -> Tensor:
        """`result` is a stack as well."""
        if dims is not None and stack.dim() != dims + 1:
            raise ValueError(f"an expert's forward transposes a parameter of {stack.dim() - 1} dimensions")
        self._stacks[id(result)] = result
        return result

    def _shape(self, func: Callable[..., Any], stack: Tensor, *args: Any) -> Any:
        return func(torch.empty(stack.shape[1:], dtype=stack.dtype, device="meta"), *args)

    def _cast(self, func: Callable[..., Any], stack: Tensor, *args: Any, **named: Any) -> Any:
        if not self._is_stack(stack):  # x.to(weight), x.type_as(weight): only the dtype of the weight counts
            return func(stack, *args, **named)
        return self._known(func(stack, *args, **named), stack)

    def _adjoint(self, func: Callable[..., Any], stack: Tensor, dim0: int = 0, dim1: int = 1) -> Tensor:
        if {dim0 % 2, dim1 % 2} != {0, 1}:
            raise ValueError(f"an expert's forward transposes the dimensions {dim0} and {dim1} of a parameter")
        return self._known(stack.transpose(1, 2), stack, 2)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        if self._is_stack(x) or not self._is_stack(weight) or weight.dim() != 3 or x.dim() != 2:
            raise ValueError(
                f"an expert's forward multiplies {tuple(x.shape)} and a parameter {tuple(weight.shape[1:])}; accepted: "
                "rows [R, Din] times a matrix"
            )
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if bias is not None and not self._is_stack(bias):
            product = torch.ops.ep_fx.grouped_mm(x, weight, self._counts, None, transposed)
            return cast(Tensor, product + bias)
        return cast(Tensor, torch.ops.ep_fx.grouped_mm(x, weight, self._counts, bias, transposed))

    def _by_row(self, func: Callable[..., Any], x: Any, y: Any, **named: Any) -> Any:
        if self._is_stack(x) and not isinstance(y, Tensor):
            return self._known(func(x, y, **named), x)
        other = y if self._is_stack(x) else x
        return func(self._of_rows(x, other), self._of_rows(y, other), **named)

    def _norm(
        self,
        func: Callable[..., Any],
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float | None = None,
        **_: Any,
    ) -> Tensor:
        is_layer = func in (F.layer_norm, torch.layer_norm)
        if not is_layer and bias is not None:  # rms_norm(x, shape, weight, eps): its fourth argument is no bias
            bias, eps = None, cast(float, bias)
        plain = func(x, shape, None, None, 1e-5 if eps is None else eps) if is_layer else func(x, shape, None, eps)
        scaled = plain if weight is None else plain * self._of_rows(weight, plain)
        return cast(Tensor, scaled if bias is None else scaled + self._of_rows(bias, plain))

    def _of_rows(self, value: Any, like: Any) -> Any:
        """The vector of each row's expert, for a stack of vectors or numbers; else `value` itself."""
        if not self._is_stack(value):
            return value
        if value.dim() > 2 or self._is_stack(like) or like.dim() != 2:
            raise ValueError(
                f"an expert's forward combines a parameter {tuple(value.shape[1:])} with {tuple(like.shape)} element "
                "by element; accepted: vectors [F] with rows [R, F]"
            )
        padded = torch.cat((value, value.new_zeros((1, *value.shape[1:]))))
        return padded.index_select(0, expert_of_rows(like, self._counts)).reshape(like.shape[0], -1)


def expert_of_rows(rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """The expert of each row [R]; the number of experts behind the last one's rows."""
    ends = tokens_per_expert.cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)


def _flat(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found
