"""What cannot work is refused on every rank, with what was expected, what was given, and what to do."""
from __future__ import annotations

from ep_fx.testing import RankPools
from tests.styles.bad_inputs import Refusals, arguments, calls, transformed

ARGUMENTS = {
    "no mesh": ("TypeError", "torch DeviceMesh", "tuple"),
    "dimension": ("ValueError", "('ep',)", "('tp',)", "['ep'] must be among its mesh_dim_names"),
    "other names": ("ValueError", "('data', 'model')", "['ep', 'tp']"),
    "no names": ("ValueError", "shape (4,) has no names"),
    "no module": ("TypeError", "torch.nn.Module", "builtin_function_or_method"),
    "no experts": ("ValueError", "Linear contains no experts", "experts(x, num_tokens_per_expert, scores=None)"),
    "two layers": ("ValueError", "contains 2 experts modules", "blocks.1.moe.experts", "apply it to each"),
    "6 experts on 4": ("ValueError", "experts: 6 experts", "'ep' of size 4", "[1, 2, 3, 6]"),
    "hidden 30 on 4": ("ValueError", "w1 (4, 30, 16): 30 hidden features", "'tp' of size 4"),
    "names for tp": ("ValueError", "experts.w (4, 8, 8)", "w1, w3 [E, hidden, dim] and w2", "ExpertParallel()"),
    "twice": ("ValueError", "ExpertParallel() was applied to this module before"),
    "twice, inside": ("ValueError", "ExpertParallel() was applied to this module before"),
    "forward of its own": ("ValueError", "experts: this HandExperts has a forward of its own"),
    "DTensor": ("ValueError", "experts.w is a DTensor (Replicate(),)", "another parallelism"),
    "fully_shard over ep": ("ValueError", "sharded by fully_shard over ranks [0, 1, 2, 3]", "mesh=mesh['fsdp']"),
    "fully_shard on another mesh": ("ValueError", "no part of the mesh", "slice both from one mesh"),
}
CALLS = {
    "3-D x": ("ValueError", "experts: expected x [N, D]", "(1, 4, 8)"),
    "counts of local experts": ("ValueError", "counts [4]", "(1,)"),
    "scores": ("ValueError", "scores must be [4] or [4, 1], got (3,)"),
    "too many": ("ValueError", "8 rows are counted for experts, there are 4"),
    "divide factor": ("ValueError", "set_gradient_divide_factor(4)", "twice"),
    "router not reduced": ("ValueError", "1 parameters outside", "['router.weight']", "the whole MoE, or shard them"),
    "router not reduced, no gradient": ("nothing",),
    "output is no row": ("ValueError", "HandExperts: experts must return [", "8)"),
    "not contiguous": ("nothing",),
    "counts of floats": ("nothing",),
}


def _assert_refused(raised: list[Refusals], expected: dict[str, tuple[str, ...]]) -> None:
    for rank, by_case in enumerate(raised):
        assert by_case.keys() == expected.keys()
        for case, (kind, *parts) in expected.items():
            got, message, _ = by_case[case]
            assert got == kind, f"rank {rank}, {case}: {got}: {message}"
            assert all(part in message for part in parts), f"rank {rank}, {case}: {message}"


def test_apply_refuses_before_it_changes_anything(ranks: RankPools) -> None:
    _assert_refused(ranks(4).run(arguments), ARGUMENTS)


def test_calls_that_cannot_work_are_refused_and_others_work(ranks: RankPools) -> None:
    _assert_refused(ranks(4).run(calls), CALLS)


def test_ho_03_and_ho_04_transform_says_the_same_in_whatever_order_ep_and_fsdp_were_applied(ranks: RankPools) -> None:
    for first, second in ranks(4).run(transformed):
        assert first == second
        assert "ExpertParallel() was applied to the experts 'blocks.0.moe.experts'" in first
        assert "plan={'blocks.0.moe.experts': ExpertParallel()}" in first
