"""R19, recompute leaves layers gathered after backward.

Sources: NVIDIA/Megatron-LM PR#6153, pytorch/pytorch PR#164009, ByteDance-Seed/VeOmni PR#871.
Prefetch of forward runs again during recompute and gathers a layer whose backward is over: its memory stays, or its
gradient lands on an empty shard. Of checkpointed blocks every gather must have its free, none may follow the last use
in backward, and after each step all parameters are shards again.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import ep_fx
from ep_fx.graph import Phase, Role, role_of
from ep_fx.testing import CollectiveLog, RankPools, local_mesh
from tests.cases.hand import M4
from tests.models.tiny_moe import TinyMoE, next_token_loss, token_ids
from tests.oracle import assert_all_gradients_close, oracle

IDS = [(token_ids(rank),) for rank in range(4)]


class Recomputed(TinyMoE):
    """Two blocks, each under a checkpoint."""

    def __init__(self) -> None:
        super().__init__(blocks=2, grouped=True)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(self.norm(h))


def steps(rank: int) -> dict[str, Any]:
    """Two steps: what each gathers, frees and leaves gathered, and the gradients of the last."""
    module, ids = ep_fx.transform(Recomputed(), local_mesh(**M4)), token_ids(rank)
    parameters: dict[str, Any] = dict(module.named_parameters())
    shards = {name: p.to_local().shape for name, p in parameters.items()}
    seen = []
    for _ in range(2):
        module.zero_grad()
        with CollectiveLog(dialect=True) as log:
            next_token_loss(module(ids), ids).backward()
        gathered, freed = ([e.shapes for e in log.of(op)] for op in ("unshard", "reshard"))
        seen.append((sum(map(len, gathered)), sum(map(len, freed)), log.live_bytes))
    return {
        "steps": seen,
        "odd": _odd_uses(list(module.graph)),
        "backward": len(module.graph.nodes(Role.UNSHARD, Phase.BACKWARD)),
        "shards": all(p.to_local().shape == p.grad.to_local().shape == shards[n] for n, p in parameters.items()),
        "gradients": {n: p.grad.full_tensor() for n, p in parameters.items()},
    }


def _odd_uses(nodes: list[fx.Node]) -> list[str]:
    """Gathered weights that nobody reads between their gather and their reshard."""
    place = {node: index for index, node in enumerate(nodes)}
    odd = []
    for reshard in (node for node in nodes if role_of(node) is Role.RESHARD):
        for weight in reshard.all_input_nodes:
            uses = [place[user] for user in weight.users if user is not reshard]
            if not uses or max(uses) > place[reshard]:
                odd.append(weight.name)
    return odd


def test_r19_every_gather_of_recomputed_blocks_is_freed_after_its_last_use(ranks: RankPools) -> None:
    want = oracle(lambda: TinyMoE(blocks=2, grouped=True), IDS, next_token_loss, IDS).gradients
    for found in ranks(4).run(steps):
        (gathered, freed, left), again = found["steps"]
        assert again == (gathered, freed, left)
        assert gathered == freed > len(want)
        assert left == 0
        assert found["odd"] == []
        assert found["backward"] > 2
        assert found["shards"]
        assert_all_gradients_close(found["gradients"], want)
