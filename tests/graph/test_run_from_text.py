"""A graph that went through text runs as the original: same outputs and gradients, bit for bit, on four ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

import ep_fx
from ep_fx.graph import parse_graph, print_graph, split
from ep_fx.runtime import Program
from ep_fx.targets import emit
from ep_fx.testing import RankPools, local_mesh
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids


def from_text(program: Program) -> Program:
    """`program` with its graph printed, read and emitted again."""
    graph = parse_graph(print_graph(program.graph), mesh=program.graph.manifest.mesh, constants=program.graph.constants)
    halves = split(graph)
    assert halves.backward is not None
    backward = emit(halves.backward, graph.constants)
    return replace(program, graph=graph, forward=emit(halves.forward, graph.constants), backward=backward)


def step(module: ep_fx.EPModule, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits and the gradient of every parameter."""
    module.zero_grad()
    logits = module(ids)
    next_token_loss(logits, ids).backward()
    return [logits.detach(), *(p.grad.to_local().clone() for p in module.parameters())]  # type: ignore[union-attr]


def twice(rank: int) -> bool:
    """Whether the module runs the same before and after its graph went through text."""
    ids = token_ids(rank)
    module = ep_fx.transform(TinyMoE(blocks=1, shared=True), local_mesh(fsdp=2, ep=2))
    before = step(module, ids)
    for known in module._programs.values():
        known[:] = [from_text(program) for program in known]
    after = step(module, ids)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_graph_from_text_runs_bit_for_bit_the_same_on_four_ranks(ranks: RankPools) -> None:
    assert ranks(4).run(twice) == [True] * 4
