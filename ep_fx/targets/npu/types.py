"""Rule `kernel-types`: what is recorded of the functions of the target is what they give.

The fake twin of a kernel, or a composition itself, runs on the recorded arguments; shape and dtype of the result must
be those recorded, where sizes known only at run time may have other names. No guard is added.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from ep_fx.targets.npu.kernels import COMPOSITIONS, KERNELS
from ep_fx.targets.npu.kernels.exchange import npu_gmm_alltoallv
from ep_fx.targets.npu.kernels.registry import types_of
from ep_fx.verify import Facts, Violation, rule
from ep_fx.verify.types import difference

FUNCTIONS = {id(function): types_of(function) for function in (KERNELS | COMPOSITIONS).values()}


@rule("kernel-types", "the functions of the target give the recorded shape and dtype")
def kernel_types(facts: Facts) -> Iterator[Violation]:
    nodes = [node for node in facts.nodes if id(node.target) in FUNCTIONS and node.meta.get("val") is not None]
    known = {node: node.meta.get("val") for node in facts.nodes}
    mode = detect_fake_mode([v for v in pytree.tree_leaves([known[n] for n in nodes]) if isinstance(v, torch.Tensor)])
    if mode is None:
        return
    names: dict[sympy.Symbol, sympy.Expr] = {}
    with ExitStack() as stack:
        stack.enter_context(mode)
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(mode.shape_env.suppress_guards())
        for node in nodes:
            if all(known.get(source) is not None for source in node.all_input_nodes):
                facts.checked += 1
                yield from _check(node, known, names)


def _check(node: fx.Node, known: dict[fx.Node, Any], names: dict[sympy.Symbol, sympy.Expr]) -> Iterator[Violation]:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    try:
        result = FUNCTIONS[id(node.target)](*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        first = str(error).strip().split("\n")[0]
        yield Violation(node, "arguments that the function accepts", first, "make their types and shapes fit")
        return
    if node.target is npu_gmm_alltoallv:  # as many rows as are in its counts, which no fake has
        result = result.new_empty((known[node].shape[0], *result.shape[1:]))
    if (found := difference(result, known[node], names, strides=False)) is not None:
        yield Violation(node, f"recorded: {found[1]}", f"computed: {found[0]}", "record what the node gives")
