"""R17, sizes that do not divide, found late or never.

Sources: pytorch/torchtitan PR#4258, vllm-project/vllm#52435, DeepSpeed PR#7537 for #7535.
A mesh dimension truncates to 0, the number of experts is taken for the number of ranks, or floor division loses
experts. Each is a ValueError inside `transform`, on every rank, with both numbers, before any process group is made.
A mesh without ``ep`` is no fault by itself (experts are then sharded like everything else); a plan that wants to split
experts over it is.
"""
from __future__ import annotations

from ep_fx.testing import RankPools
from tests.api.bad_inputs import degrees

EXPECTED = {
    "6 experts on ep 4": ("6", "4"),
    "4 experts on ep 3": ("4", "3"),
    "2 experts on ep 4": ("2", "4"),
    "5 of 4 experts": ("5", "4"),
    "plan without ep": ("'ep'", "['fsdp']"),
}


def test_r17_each_is_a_value_error_on_every_rank_with_both_numbers_and_before_any_group(ranks: RankPools) -> None:
    for rank, by_case in enumerate(ranks(4).run(degrees)):
        kind, _, groups = by_case.pop("fits")
        assert (kind, groups > 0) == ("nothing", True), "the spy sees the groups of a transform that goes through"
        assert by_case.keys() == EXPECTED.keys()
        for case, parts in EXPECTED.items():
            kind, message, groups = by_case[case]
            assert (kind, groups) == ("ValueError", 0), f"rank {rank}, {case}: {kind}: {message}"
            assert all(part in message for part in parts), f"rank {rank}, {case}: {message}"
