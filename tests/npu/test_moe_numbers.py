"""Each lowering against the dialect's own kernels, forward and gradients, on the npu device, with ATen's kernels alone.

Unbalanced routing, an expert without rows, no rows at all, ids that mean "no expert", one expert a token and several,
fp32 and bf16 with weights in fp32.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ep_fx.graph import NodeInfo, ParallelGraph, Phase, set_info
from ep_fx.ops import dispatch_context
from ep_fx.targets.npu import lower
from ep_fx.targets.npu.kernels import KERNELS
from ep_fx.testing.ranks import RankPool
from tests.npu.joint import errors, graph_of, on_cpu, on_device, record, targets, traced

ops, aten = torch.ops.ep_fx, torch.ops.aten
EXPERTS, WIDTH, HIDDEN = 4, 8, 16
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
Made = tuple[ParallelGraph, list[Tensor]]


def _random(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _ids(tokens: int, top_k: int) -> Tensor:
    """Unbalanced: most choices are expert 0, some none (`EXPERTS`), none is expert 2."""
    choices = torch.tensor([0, 0, 3, 1, 0, EXPERTS, 0, 1])
    return choices.repeat(tokens * top_k)[: tokens * top_k].view(tokens, top_k)


# -- routing -----------------------------------------------------------------------------------------------------------
def routing(tokens: int, top_k: int, dtype: torch.dtype, weights: torch.dtype) -> Made:
    def run(x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        rows, counts, order = ops.permute(x, ids, EXPERTS)
        y = ops.unpermute(rows * 2, order, w)
        return y, counts, *torch.autograd.grad(y, (x, w), dy)

    inputs = [_random(tokens, WIDTH, dtype=dtype), _ids(tokens, top_k), _random(tokens, top_k, dtype=weights, seed=1)]
    inputs.append(_random(tokens, WIDTH, dtype=dtype, seed=2))
    return traced(run, *inputs), inputs


# -- exchange ----------------------------------------------------------------------------------------------------------
def exchange(counts: list[list[int]], dtype: torch.dtype, first: str = "rows") -> Made:
    """Rows and their weights there and back, and their gradients: two ranks' rows for two local experts each."""
    received = torch.tensor(counts)
    total = int(received.sum())
    graph = ParallelGraph(fx.Graph(), graph_of(fx.Graph()).manifest)
    names = ("rows", "weights", "grad", "sent", "received")
    rows, weights, grad, sent, got = (graph.graph.placeholder(name) for name in names)
    context = graph.call(dispatch_context, sent, got, total, 2, "experts")
    order, local = (graph.call(operator.getitem, context, i) for i in (0, 4))
    moved = {"rows": rows, "weights": weights}
    there = [graph.call(ops.regroup.default, moved[name], order) for name in sorted(moved, key=first.__ne__)]
    back = graph.call(ops.ungroup.default, there[0], order)
    backward = [graph.call(ops.regroup.default, grad, order)]
    backward += [graph.call(ops.ungroup.default, x, order) for x in there]
    for node in backward:
        set_info(node, NodeInfo(Phase.BACKWARD))
    graph.graph.output((*there, back, *backward, local))
    inputs = [_random(total, WIDTH, dtype=dtype), _random(total, seed=1), _random(total, WIDTH, dtype=dtype, seed=2)]
    inputs += [received.reshape(-1), received.reshape(-1)]
    record(graph, *inputs)
    return graph, inputs



# -- products ----------------------------------------------------------------------------------------------------------
def products(
    counts: list[int], dtype: torch.dtype, transposed: bool, bias: bool, rest: int = 0, view: bool = False
) -> Made:
    def run(x: Tensor, w: Tensor, sizes: Tensor, b: Tensor, dy: Tensor) -> Any:
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        weight = w.transpose(1, 2) if view else w
        y = ops.grouped_mm(x, weight, sizes, b if bias else None, transposed is not view)
        return y, *torch.autograd.grad(y, (x, w, *([b] if bias else [])), dy)

    rows = sum(counts) + rest
    shape = (HIDDEN, WIDTH) if transposed else (WIDTH, HIDDEN)
    inputs = [_random(rows, WIDTH, dtype=dtype), _random(len(counts), *shape, dtype=dtype, seed=1)]
    inputs += [torch.tensor(counts)]
    inputs += [_random(len(counts), HIDDEN, dtype=dtype, seed=2), _random(rows, HIDDEN, dtype=dtype, seed=3)]
    return traced(run, *inputs), inputs


# -- experts -----------------------------------------------------------------------------------------------------------
def fused(counts: list[int], dtype: torch.dtype) -> Made:
    """Gate and up in one weight."""

    def run(x: Tensor, w: Tensor, sizes: Tensor, dy: Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        gate, up = ops.grouped_mm(x, w, sizes, None, True).chunk(2, -1)
        y = F.silu(gate) * up
        return y, *torch.autograd.grad(y, (x, w), dy)

    rows = sum(counts)
    inputs = [_random(rows, WIDTH, dtype=dtype), _random(len(counts), 2 * HIDDEN, WIDTH, dtype=dtype, seed=1)]
    inputs += [torch.tensor(counts), _random(rows, HIDDEN, dtype=dtype, seed=2)]
    return traced(run, *inputs), inputs


def separate(counts: list[int], dtype: torch.dtype, view: bool, bias: bool = False) -> Made:
    """Gate and up with weights of their own, which are transposed as views or by the product."""

    def run(x: Tensor, w1: Tensor, w3: Tensor, b1: Tensor, b3: Tensor, sizes: Tensor, dy: Tensor) -> Any:
        x, w1, w3, b1, b3 = (t.detach().requires_grad_() for t in (x, w1, w3, b1, b3))
        a, b = (w.transpose(-2, -1) if view else w for w in (w1, w3))
        gate = F.silu(ops.grouped_mm(x, a, sizes, b1 if bias else None, not view))
        y = gate * ops.grouped_mm(x, b, sizes, b3 if bias else None, not view)
        return y, *torch.autograd.grad(y, (x, w1, w3, *([b1, b3] if bias else [])), dy)

    rows, number = sum(counts), len(counts)
    inputs = [_random(rows, WIDTH, dtype=dtype)]
    inputs += [_random(number, HIDDEN, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2)]
    inputs += [_random(number, HIDDEN, dtype=dtype, seed=seed) for seed in (3, 4)]
    inputs += [torch.tensor(counts), _random(rows, HIDDEN, dtype=dtype, seed=5)]
    return traced(run, *inputs), inputs


def cast(counts: list[int]) -> Made:
    """Gate and up in bf16 from parameters and rows in fp32, each cast where it is used."""

    def run(x: Tensor, w1: Tensor, w3: Tensor, sizes: Tensor, dy: Tensor) -> Any:
        x, w1, w3 = (t.detach().requires_grad_() for t in (x, w1, w3))
        gate, up = (
            ops.grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), sizes, None, False) for w in (w1, w3)
        )
        y = F.silu(gate) * up
        return y, *torch.autograd.grad(y, (x, w1, w3), dy)

    rows, number = sum(counts), len(counts)
    inputs = [_random(rows, WIDTH), *(_random(number, HIDDEN, WIDTH, seed=seed) for seed in (1, 2))]
    inputs += [torch.tensor(counts), _random(rows, HIDDEN, dtype=torch.bfloat16, seed=5)]
    return traced(run, *inputs), inputs


F32, BF16 = torch.float32, torch.bfloat16
UNEVEN, NONE = [5, 0, 1, 7], [0, 0, 0, 0]
PERMUTES = {"npu_moe_token_permute", "npu_moe_token_unpermute", "npu_moe_token_permute_grad_v2",
            "npu_moe_token_unpermute_grad_v2"}  # fmt: skip
GROUPED, ACTIVATION = {"npu_grouped_matmul"}, {"npu_swiglu", "npu_swiglu_backward"}
REST = {"rest_counted", "rest_appended"}
CASES: dict[str, tuple[Callable[[], Made], set[str]]] = {
    "top-2": (lambda: routing(7, 2, F32, F32), PERMUTES | {"tokens_per_expert"}),
    "top-1": (lambda: routing(7, 1, F32, F32), PERMUTES | {"tokens_per_expert"}),
    "top-2 in bf16, weights in fp32": (lambda: routing(7, 2, BF16, F32), PERMUTES | {"tokens_per_expert"}),
    "top-2 in fp32, weights in bf16": (lambda: routing(7, 2, F32, BF16), PERMUTES | {"tokens_per_expert"}),
    "no tokens": (lambda: routing(0, 2, F32, F32), PERMUTES | {"tokens_per_expert"}),
    "exchange": (lambda: exchange([[3, 0], [1, 4]], F32), PERMUTES | {"dispatch_context"}),
    "exchange in bf16": (lambda: exchange([[3, 0], [1, 4]], BF16), PERMUTES | {"dispatch_context"}),
    "exchange of weights first": (lambda: exchange([[0, 2], [2, 1]], F32, "weights"), PERMUTES | {"dispatch_context"}),
    "exchange of nothing": (lambda: exchange([[0, 0], [0, 0]], F32), PERMUTES | {"dispatch_context"}),
    "product": (lambda: products(UNEVEN, F32, True, False), GROUPED | REST),
    "product, not transposed": (lambda: products(UNEVEN, F32, False, False), GROUPED | REST),
    "product of a view": (lambda: products(UNEVEN, F32, True, False, view=True), GROUPED | REST),
    "product in bf16": (lambda: products(UNEVEN, BF16, True, False), GROUPED | REST),
    "product with bias": (lambda: products(UNEVEN, F32, False, True), GROUPED | REST | {"bias_grad"}),
    "product with bias in bf16": (lambda: products(UNEVEN, BF16, False, True), GROUPED | REST | {"bias_grad"}),
    "product of no rows": (lambda: products(NONE, F32, True, True), GROUPED | REST | {"bias_grad"}),
    "rows of no expert": (lambda: products(UNEVEN, F32, True, True, rest=3), GROUPED | REST | {"bias_grad"}),
    "one weight": (lambda: fused(UNEVEN, F32), GROUPED | REST | ACTIVATION),
    "one weight in bf16": (lambda: fused(UNEVEN, BF16), GROUPED | REST | ACTIVATION),
    "one weight, no rows": (lambda: fused(NONE, F32), GROUPED | REST | ACTIVATION),
    "two weights": (lambda: separate(UNEVEN, F32, False), GROUPED | REST | ACTIVATION),
    "two weights as views": (lambda: separate(UNEVEN, F32, True), GROUPED | REST | ACTIVATION),
    "two weights with biases": (lambda: separate(UNEVEN, F32, True, True), GROUPED | REST | ACTIVATION | {"bias_grad"}),
    "two weights in fp32, cast to bf16": (lambda: cast(UNEVEN), GROUPED | REST | ACTIVATION),
    "two weights in bf16, no rows": (lambda: separate(NONE, BF16, False), GROUPED | REST | ACTIVATION),
}  # fmt: skip


def _compare(rank: int, name: str) -> tuple[list[float], set[str], dict[str, int]]:
    """The errors of the results, the functions that are called and the operators that ran."""
    graph, inputs = CASES[name][0]()
    results, calls = on_device(graph, *inputs)
    return errors(results, on_cpu(graph, *inputs)), targets(graph), calls


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("two weights")])
def test_two_weights_are_one_product_in_both_directions(name: str) -> None:
    lowered = lower(CASES[name][0]()[0])
    products = [node for node in lowered if node.target is KERNELS["npu_grouped_matmul"]]
    assert len(products) == 3


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, npu_rank: RankPool) -> None:
    ((found, functions, calls),) = npu_rank.run(_compare, name)
    half = "bf16" in name
    assert max(found) <= TOLERANCE[BF16 if half else F32], found
    assert functions == CASES[name][1]
    rows = not any(word in name for word in ("no rows", "no tokens", "nothing"))
    assert set(calls) == ({f for f in functions if f.startswith("npu_")} if rows else set())
