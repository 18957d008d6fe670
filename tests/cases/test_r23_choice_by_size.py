"""R23, a run-time communication choice is fixed at capture.

Sources: vllm-project/vllm-ascend PR#10557, vllm-project/vllm PR#55464 (review).
A block takes one path for many tokens and another for few. A graph that keeps the first choice is garbled at other
sizes: here a size on the other side of the condition is another capture. Where the other path reads all experts'
weights itself, which no rank has, it is refused: a rank's part of them would give another answer on every rank.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ep_fx
from ep_fx.testing import RankPools, local_mesh
from tests.cases.hand import M4, M4E
from tests.models.hand_moe import HandExperts
from tests.models.moe import MoE
from tests.oracle import relative_error

SIZES = (8, 2, 8, 5, 4, 1, 16)


class Choosing(MoE):
    """More than 4 tokens go to their expert; of fewer each goes to all experts, weighed by its probabilities.

    Args:
        dense: the second path multiplies with all weights at once, past the experts' forward.
    """

    def __init__(self, dense: bool) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 4, bias=False), HandExperts(), 1)
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            return super().forward(x)
        tokens = x.shape[0]
        if self.dense:
            everything = (x @ self.experts.w.sum(0)).unsqueeze(1)
        else:
            rows = x.unsqueeze(0).expand(4, tokens, 8).reshape(4 * tokens, 8)
            counts = torch.full((4,), 1) * tokens
            everything = self.experts(rows, counts).view(4, tokens, 8).transpose(0, 1)
        return (everything * self.router(x).softmax(-1).unsqueeze(-1)).sum(1)


def _tokens(rank: int, size: int) -> Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(10 * size + rank))


def sizes_in_turn(rank: int) -> tuple[list[float], int]:
    """The error for each of SIZES against the eager model, and the number of captures."""
    module, eager = ep_fx.transform(Choosing(False), local_mesh(**M4)), Choosing(False)
    errors = []
    for size in SIZES:
        y = module(_tokens(rank, size))
        y.sum().backward()
        errors.append(relative_error(y, eager(_tokens(rank, size))))
    return errors, len(module.programs)


def refusal(rank: int, sizes: dict[str, int]) -> tuple[float, str]:
    """The error on the accepted path, and what is said about the other."""
    module, eager = ep_fx.transform(Choosing(True), local_mesh(**sizes)), Choosing(True)
    error = relative_error(module(_tokens(rank, 8)), eager(_tokens(rank, 8)))
    with pytest.raises(ValueError, match="experts") as refused:
        module(_tokens(rank, 2))
    return error, str(refused.value)


def test_r23_each_size_takes_the_path_that_eager_takes(ranks: RankPools) -> None:
    for errors, captures in ranks(4).run(sizes_in_turn):
        assert max(errors) <= 1e-5
        assert captures == 3, "one for each path, and one for the size 1, which is apart"


@pytest.mark.parametrize("sizes", [M4, M4E], ids=["M4", "M4e"])
def test_r23_a_path_that_reads_a_ranks_own_experts_only_is_refused(ranks: RankPools, sizes: dict[str, int]) -> None:
    for error, message in ranks(4).run(refusal, sizes):
        assert error <= 1e-5
        for part in (f"of whose 4 experts a rank holds {4 // sizes['ep']}", "output 0", "test_r23_choice_by_size.py:"):
            assert part in message
