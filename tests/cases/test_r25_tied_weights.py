"""R25, embedding and head are one weight.

Sources: pytorch/torchtitan#1524, NVIDIA/Megatron-LM#1447, pytorch/pytorch#176076, huggingface/accelerate PR#4171,
NVIDIA-NeMo/RL#227.
The weight is sharded twice, refused, or untied, so that each use trains a copy; or, where the vocabulary does not
divide by the ranks, the last rows are never updated. Five rows on four ranks are shards of 2, 1, 1 and 1, three leave
one rank without any: after three steps every row would show it. Both names must go out with a state and come back as
one weight.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch

import ep_fx
from ep_fx.graph import Phase
from ep_fx.testing import RankPools, local_mesh
from ep_fx.verify.reduction_table import reduction_table
from tests.cases.gathers import gathered
from tests.cases.hand import M4
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import relative_error

STEPS = 3
NAMES = ("embedding.weight", "head.weight")


def _model(vocabulary: int, seed: int = 0) -> TinyMoE:
    return TinyMoE(blocks=1, vocabulary=vocabulary, tied=True, seed=seed)


def trained(rank: int, vocabulary: int) -> dict[str, Any]:
    """Three SGD steps beside the oracle's, how the weight is gathered and reduced, and a state there and back."""
    module, eager = ep_fx.transform(_model(vocabulary), local_mesh(**M4)), _model(vocabulary)
    ours = torch.optim.SGD(module.parameters(), lr=0.5)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.5)
    batches = [token_ids(r, vocabulary=vocabulary) for r in range(4)]
    for _ in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        next_token_loss(module(batches[rank]), batches[rank]).backward()
        for ids in batches:
            (next_token_loss(eager(ids), ids) / 4).backward()
        ours.step()
        theirs.step()
    state, want = module.full_state_dict(), eager.state_dict()
    first = _model(vocabulary).state_dict()[NAMES[0]]
    rows = [relative_error(a, b) for a, b in zip(state[NAMES[0]], want[NAMES[0]], strict=True)]
    moved = [float((a - b).abs().max()) for a, b in zip(want[NAMES[0]], first, strict=True)]
    fresh = _model(vocabulary, 1)
    fresh.load_state_dict(state, strict=True)
    other = _model(vocabulary, 2).state_dict()
    module.load_state_dict(other)
    back = module.full_state_dict()
    embedding: Any = module.embedding
    return {
        "rows": rows,
        "moved": moved,
        "states": {name: relative_error(state[name], w) for name, w in want.items()},
        "keys": [state.keys() == want.keys(), module.state_dict().keys() == want.keys()],
        "into the model": all(torch.equal(fresh.state_dict()[name], state[name]) for name in want),
        "back": all(torch.equal(back[name], w) for name, w in other.items()),
        "one weight": embedding.weight is module.head.weight,  # type: ignore[union-attr]
        "parameters": [sum(p is embedding.weight for p in module.parameters()), len(list(module.parameters()))],
        "rows held": embedding.weight.to_local().shape[0],
        "gathered": [gathered(module.graph, phase)["param_embedding_weight"] for phase in Phase],
        "reduced": [row.steps for row in reduction_table(module.graph) if row.parameter in NAMES],
    }


@pytest.mark.parametrize(
    ("vocabulary", "held"), [(5, [2, 1, 1, 1]), pytest.param(3, [1, 1, 1, 0], marks=pytest.mark.slow)]
)
def test_r25_a_tied_weight_is_one_weight_and_every_row_of_it_is_trained(
    ranks: RankPools, vocabulary: int, held: list[int]
) -> None:
    runs = ranks(4).run(trained, vocabulary)
    assert [run["rows held"] for run in runs] == held
    for run in runs:
        assert max(run["rows"]) <= 1e-5
        assert min(run["moved"]) > 1e-2, "every row must have something to learn"
        assert max(run["states"].values()) <= 1e-5
        assert run["keys"] == [True, True]
        assert run["into the model"]
        assert run["back"]
        assert run["one weight"]
        assert run["parameters"] == [1, len(list(_model(vocabulary).parameters()))]
        assert run["gathered"] == [1, 1], "once in each direction"
        assert run["reduced"] == [("reduce-scatter over fsdp,ep",)]
