"""What the rule `partial` says that the ranks along tp hold, against numbers: the parts join to what one rank computes.

Each function runs whole, and on the parts of two ranks; joined as `follow` says, the parts' results are the whole one.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import ep_fx  # noqa: F401  registers the dialect
from ep_fx.graph import role_of
from ep_fx.verify.cut_flow import follow
from ep_fx.verify.cuts import SUMMAND, Cut, NotKnownError, State

TP = 2
ops = torch.ops.ep_fx
COUNTS = torch.tensor([2, 0, 3])
Function = Callable[..., Tensor]


def whole(*shape: int) -> tuple[Tensor, State]:
    return torch.randn(shape, dtype=torch.float64), None


def cut(*shape: int, dim: int, blocks: int = 1) -> tuple[Tensor, State]:
    return torch.randn(shape, dtype=torch.float64), Cut(dim, blocks)


def summand(*shape: int) -> tuple[Tensor, State]:
    return torch.randn(shape, dtype=torch.float64), SUMMAND


def part(value: Tensor, state: State, rank: int) -> Tensor:
    if isinstance(state, Cut):
        return torch.cat([b.chunk(TP, state.dim)[rank] for b in value.chunk(state.blocks, state.dim)], state.dim)
    return value * (0.25, 0.75)[rank] if state is SUMMAND else value


def join(parts: list[Tensor], state: State) -> Tensor:
    if isinstance(state, Cut):
        pieces = [p.chunk(state.blocks, state.dim) for p in parts]
        return torch.cat([piece[block] for block in range(state.blocks) for piece in pieces], state.dim)
    if state is SUMMAND:
        return parts[0] + parts[1]
    torch.testing.assert_close(parts[0], parts[1])
    return parts[0]


def result_of(fn: Function, inputs: list[tuple[Tensor, State]]) -> State:
    """What `follow` says of the last node."""
    first = [part(value, state, 0) for value, state in inputs]
    graph = make_fx(lambda *parts: fn(*parts), tracing_mode="fake", _allow_non_fake_inputs=True)(*first).graph
    states: dict[Any, Any] = {}
    for node, (_, state) in zip([n for n in graph.nodes if n.op == "placeholder"], inputs, strict=True):
        states.update({node: state} if state is not None else {})
    for node in graph.nodes:
        if node.op == "call_function" and not states.keys().isdisjoint(node._input_nodes):
            found = follow(node, role_of(node), states)
            states.update({node: found} if found is not None else {})
    output = next(n for n in graph.nodes if n.op == "output").args[0]
    found = states.get(output)
    assert not isinstance(found, tuple)
    return found


def product(x: Tensor, w: Tensor, transposed: bool = True) -> Tensor:
    result: Tensor = ops.grouped_mm(x, w, COUNTS, None, transposed)
    return result


def backward(pick: int) -> Function:
    return lambda g, x, w: ops.grouped_mm_backward(g, x, w, COUNTS, True, True)[pick]


def halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def interleaved(x: Tensor) -> Tensor:
    return x[..., ::2].clamp(max=0.5) * torch.sigmoid(x[..., 1::2])


def gathered(w: Tensor) -> Tensor:
    return w[torch.tensor([0, 2, 2, 1])]


def gradient(fn: Function) -> Function:
    """From the gradient of the result to that of the first argument."""

    def of(g: Tensor, *inputs: Tensor) -> Tensor:
        first = inputs[0].detach().requires_grad_()
        return torch.autograd.grad(fn(first, *inputs[1:]), first, g)[0]

    return of


X, W1, W2 = (5, 4), (3, 8, 4), (3, 4, 8)
RIGHT: dict[str, tuple[Function, list[tuple[Tensor, State]], State]] = {
    "into": (product, [whole(*X), cut(*W1, dim=1)], Cut(1)),
    "out of": (product, [cut(5, 8, dim=1), cut(*W2, dim=2)], SUMMAND),
    "into, packed": (product, [whole(*X), cut(*W1, dim=1, blocks=2)], Cut(1, 2)),
    "the other form": (lambda x, w: product(x, w, False), [cut(5, 8, dim=1), cut(3, 8, 4, dim=1)], SUMMAND),
    "a summand's product": (product, [summand(*X), whole(*W1)], SUMMAND),
    "gradient of x": (backward(0), [cut(5, 8, dim=1), whole(*X), cut(*W1, dim=1)], SUMMAND),
    "gradient of w1": (backward(1), [cut(5, 8, dim=1), whole(*X), cut(*W1, dim=1)], Cut(1)),
    "gradient of b1": (backward(2), [cut(5, 8, dim=1), whole(*X), cut(*W1, dim=1)], Cut(1)),
    "gradient of h": (backward(0), [whole(5, 4), cut(5, 8, dim=1), cut(*W2, dim=2)], Cut(1)),
    "gradient of w2": (backward(1), [whole(5, 4), cut(5, 8, dim=1), cut(*W2, dim=2)], Cut(2)),
    "mm": (torch.mm, [cut(5, 8, dim=1), cut(8, 3, dim=0)], SUMMAND),
    "mm, rows": (torch.mm, [cut(6, 8, dim=0), whole(8, 3)], Cut(0)),
    "bmm": (torch.bmm, [whole(3, 5, 4), cut(3, 4, 8, dim=2)], Cut(2)),
    "elements": (lambda a, b: F.gelu(a) * b + a, [cut(5, 8, dim=1), cut(5, 8, dim=1)], Cut(1)),
    "broadcast": (lambda a, b: a * b.unsqueeze(-1), [cut(5, 8, dim=1), whole(5)], Cut(1)),
    "a bias": (lambda a, b: a + b, [cut(5, 8, dim=1), cut(8, dim=0)], Cut(1)),
    "halves": (halves, [cut(5, 8, dim=1, blocks=2)], Cut(1)),
    "gradient of halves": (gradient(halves), [cut(5, 4, dim=1), cut(5, 8, dim=1, blocks=2)], Cut(1, 2)),
    "interleaved": (interleaved, [cut(5, 8, dim=1)], Cut(1)),
    "gradient, interleaved": (gradient(interleaved), [cut(5, 4, dim=1), cut(5, 8, dim=1)], Cut(1)),
    "weights of rows": (gathered, [cut(*W1, dim=1)], Cut(1)),
    "gradient of those": (gradient(gathered), [cut(4, 8, 4, dim=1), cut(*W1, dim=1)], Cut(1)),
    "transpose": (lambda w: w.transpose(-1, -2), [cut(*W1, dim=1)], Cut(2)),
    "permute": (lambda w: w.permute(2, 0, 1), [cut(*W1, dim=1)], Cut(2)),
    "view": (lambda x: x.view(2, 3, -1, 1), [cut(6, 8, dim=1)], Cut(2)),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1), [cut(6, 8, dim=1)], Cut(1)),
    "expand": (lambda x: x.expand(3, *x.shape), [cut(6, 8, dim=1)], Cut(2)),
    "select": (lambda w: w[1], [cut(*W1, dim=1)], Cut(0)),
    "rows": (lambda x: x[2:4], [cut(6, 8, dim=1)], Cut(1)),
    "stack": (lambda a, b: torch.stack([a, b]), [cut(6, 8, dim=1), cut(6, 8, dim=1)], Cut(2)),
    "joined": (lambda a, b: torch.cat([a, b], 1), [cut(6, 8, dim=1), cut(6, 8, dim=1)], Cut(1, 2)),
    "joined rows": (lambda a, b: torch.cat([a, b]), [cut(6, 8, dim=1), cut(6, 8, dim=1)], Cut(1)),
    "sum of features": (lambda x: x.sum(1), [cut(6, 8, dim=1)], SUMMAND),
    "sum of rows": (lambda x: x.sum(0), [cut(6, 8, dim=1)], Cut(0)),
    "a sum of summands": (lambda a, b: a + 2 * b, [summand(5, 4), summand(5, 4)], SUMMAND),
    "a scale": (lambda a, s: a * s.unsqueeze(-1) / 3, [summand(5, 4), whole(5)], SUMMAND),
    "chosen rows of summands": (lambda a: a[torch.tensor([1, 0])].sum(0), [summand(5, 4)], SUMMAND),
    "zeros added": (lambda a: a + torch.zeros_like(a), [summand(5, 4)], SUMMAND),
    "masked": (lambda a, m: a.masked_fill(m > 0, 0.0), [summand(5, 4), whole(5, 4)], SUMMAND),
    "zeros like": (lambda a: torch.zeros_like(a), [summand(5, 4)], None),
}
WRONG: dict[str, tuple[Function, list[tuple[Tensor, State]]]] = {
    "not linear": (F.relu, [summand(5, 4)]),
    "square": (operator.mul, [summand(5, 4), summand(5, 4)]),
    "its own square": (lambda a: a * a, [summand(5, 4)]),
    "quotient of summands": (operator.truediv, [summand(5, 4), summand(5, 4)]),
    "divided by a summand": (operator.truediv, [whole(5, 4), summand(5, 4)]),
    "rounded": (lambda a, b: torch.div(a, b, rounding_mode="floor"), [summand(5, 4), whole(5, 4)]),
    "whole added to a summand": (operator.add, [summand(5, 4), whole(5, 4)]),
    "one added": (lambda a: a + 1, [summand(5, 4)]),
    "whole joined to a summand": (lambda a, b: torch.cat([a, b]), [summand(5, 4), whole(5, 4)]),
    "filled": (lambda a, m: a.masked_fill(m > 0, 1.0), [summand(5, 4), whole(5, 4)]),
    "softmax of features": (lambda a: a.softmax(-1), [cut(5, 8, dim=1)]),
    "norm of features": (lambda a: a / a.norm(dim=-1, keepdim=True), [cut(5, 8, dim=1)]),
    "mean of features": (lambda a: a.mean(-1), [cut(5, 8, dim=1)]),
    "halves of features that are not packed": (halves, [cut(5, 8, dim=1)]),
    "a third of the features": (lambda a: a[:, :3], [cut(5, 16, dim=1)]),
    "one feature": (lambda a: a[:, 1], [cut(5, 8, dim=1)]),
    "packed with plain": (operator.mul, [cut(5, 8, dim=1), cut(5, 8, dim=1, blocks=2)]),
    "packed into the second product": (product, [cut(5, 8, dim=1, blocks=2), cut(*W2, dim=2)]),
    "one factor cut where it sums": (torch.mm, [whole(5, 4), cut(8, 3, dim=0)]),
    "both cut elsewhere": (torch.mm, [cut(4, 6, dim=0), cut(6, 4, dim=1)]),
    "a product of summands": (torch.mm, [summand(5, 4), summand(4, 3)]),
    "features merged with rows": (lambda a: a.reshape(-1) * 2, [cut(5, 8, dim=1)]),
    "a bias in a summand": (
        lambda x, w, b: ops.grouped_mm(x, w, COUNTS, b, True),
        [cut(5, 8, dim=1), cut(*W2, dim=2), whole(3, 4)],
    ),
    "rows sorted": (lambda a: a.sort(0)[0], [cut(5, 8, dim=1)]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_parts_join_to_the_whole(name: str) -> None:
    fn, inputs, due = RIGHT[name]
    state = result_of(fn, inputs)
    assert state == due
    parts = [fn(*(part(value, how, rank) for value, how in inputs)) for rank in range(TP)]
    torch.testing.assert_close(join(parts, state), fn(*(value for value, _ in inputs)))


@pytest.mark.parametrize("name", WRONG)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    fn, inputs = WRONG[name]
    with pytest.raises(NotKnownError):
        result_of(fn, inputs)
