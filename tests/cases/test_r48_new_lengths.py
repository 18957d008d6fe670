"""R48, new sequence lengths rebuild the graph at every step.

Sources: pytorch/torchtitan PR#2823 and #3336, Dao-AILab/sonic-moe#60, allenai/OLMo-core#500.
Token counts that became constants cost a capture a step, or fail at the limit. Ten lengths, each with routing of its
own, must be served by at most two captures, and no count may stand in the graph.
"""
from __future__ import annotations

import re

import torch

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.tiny_moe import TinyMoE, token_ids
from tests.oracle import relative_error

LENGTHS = (1, 64, 2, 33, 7, 19, 48, 3, 57, 25)
BATCH = 11


def ten_lengths(rank: int) -> tuple[float, int, list[int]]:
    module, twin = ep_fx.transform(TinyMoE(grouped=True), local_mesh(**M4)), TinyMoE()
    worst = 0.0
    for length in LENGTHS:
        ids = token_ids(rank + 10 * length, BATCH, length)
        y = module(ids)
        y.square().mean().backward()
        with torch.no_grad():
            worst = max(worst, relative_error(y, twin(ids)))
    counts = {BATCH * length * factor for length in LENGTHS for factor in (1, 2)}
    code = "\n".join(line.partition("#")[0] for line in module.print_graph().splitlines() if "=" in line)
    found = {int(n) for n in re.findall(r"(?<![\w.%])\d+(?![\w.])", code)}
    assert {16, 32} <= found, "the model's own sizes do stand in the graph"
    return worst, len(module.programs), sorted(found & counts)


def test_r48_ten_lengths_take_at_most_two_captures_and_leave_no_count_in_the_graph(ranks: RankPools) -> None:
    for worst, captures, counts in ranks(4).run(ten_lengths):
        assert worst <= 1e-5
        assert captures <= 2
        assert counts == []
