"""The dispatch context: regrouping of received rows, split lists, one wait, immutability, symbolic counts."""
from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from ep_fx.ops import DispatchContext, dispatch_context, regroup_indices


@pytest.mark.parametrize(
    ("counts", "ranks", "tokens_per_expert", "total"),
    [
        ([3, 2, 1, 4], 2, [4, 6], 10),
        ([5, 0, 0, 3], 2, [5, 3], 8),
        ([0, 0, 0, 0], 2, [0, 0], 0),
        ([2, 5, 1, 0, 3, 4, 6, 0, 2], 3, [8, 8, 7], 23),
    ],
)
def test_reg_2_regroup_indices(counts: list[int], ranks: int, tokens_per_expert: list[int], total: int) -> None:
    """REG-2: counts per local expert, and one index for every row, in expert order, sources in order."""
    per_expert, indices = regroup_indices(torch.tensor(counts).view(ranks, -1))
    assert per_expert.tolist() == tokens_per_expert
    assert sorted(indices.tolist()) == list(range(total))
    experts = torch.repeat_interleave(torch.arange(len(counts)) % len(tokens_per_expert), torch.tensor(counts))
    assert indices.tolist() == experts.argsort(stable=True).tolist()


def test_reg_2_first_expert_of_two_ranks() -> None:
    """REG-2: counts [3,2,1,4]: the first local expert's rows are 0, 1, 2 of rank 0 and 5, the first of rank 1."""
    _, indices = regroup_indices(torch.tensor([[3, 2], [1, 4]]))
    assert set(indices[:4].tolist()) == {0, 1, 2, 5}


def test_reg_2_combine_sends_back_what_dispatch_received() -> None:
    """REG-2: combine's input_splits are dispatch's output_splits: two ranks' contexts mirror each other."""
    sent = torch.tensor([[3, 2, 1, 4], [5, 0, 0, 3]])
    contexts = [
        dispatch_context(sent[rank], sent.view(2, 2, 2)[:, rank].reshape(-1), 10, 2, "experts") for rank in range(2)
    ]
    for mine, other in ((0, 1), (1, 0)):
        assert contexts[mine].output_splits[other] == contexts[other].input_splits[mine]
        assert sum(contexts[mine].output_splits) == contexts[mine].permuted_indices.shape[0]
    assert [context.input_splits for context in contexts] == [(5, 5), (5, 3)]
    assert [context.output_splits for context in contexts] == [(5, 5), (5, 3)]
    assert [context.tokens_per_expert.tolist() for context in contexts] == [[8, 2], [1, 7]]
    assert contexts[0].input_shape == (10,)


def test_context_is_immutable() -> None:
    context = dispatch_context(torch.tensor([1, 2]), torch.tensor([1, 0]), 3, 2, "experts")
    assert isinstance(context, DispatchContext)
    assert isinstance(context.input_splits, tuple)
    with pytest.raises(AttributeError):
        context.input_splits = (0, 0)  # type: ignore[misc]


def test_counts_of_more_rows_than_there_are_name_the_region() -> None:
    with pytest.raises(ValueError, match=r"'layers\.3\.experts': 5 rows are counted for experts, there are 4"):
        dispatch_context(torch.tensor([2, 3]), torch.tensor([2, 3]), 4, 2, "layers.3.experts")


class _Reads(TorchDispatchMode):
    """Counts the operators whose result depends on values, which wait for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.waits.append(str(func))
        if func is torch.ops.aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None:
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


def test_only_the_split_lists_are_read_on_the_host() -> None:
    with _Reads() as reads:
        regroup_indices(torch.tensor([[3, 2], [1, 4]]), total=10)
    assert reads.waits == []
    with _Reads() as reads:
        regroup_indices(torch.tensor([[3, 2], [1, 4]]))
    assert reads.waits == ["aten.repeat_interleave.Tensor"]


def test_fake_counts_give_symbolic_splits() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        counts = torch.empty(6, dtype=torch.int64)
        context = dispatch_context(counts, counts, 11, 3, "experts")
    assert all(isinstance(split, torch.SymInt) for split in context.input_splits + context.output_splits)
    assert isinstance(context.permuted_indices.shape[0], torch.SymInt)
    assert context.tokens_per_expert.shape == (2,)
