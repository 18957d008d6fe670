"""What cannot work is refused on every rank, by the exception's class and with the numbers or the path in its text."""
from __future__ import annotations

from ep_fx.testing import RankPools
from tests.api.bad_inputs import arguments, calls

ARGUMENTS = {
    "no names": ("ValueError", "(4,) has no dimension names", "mesh_dim_names"),
    "order": ("ValueError", "('ep', 'fsdp')", "must stand in the order ('replicate', 'fsdp', 'ep', 'tp')"),
    "unknown dimension": ("ValueError", "['dp']", "accepted: ('replicate', 'fsdp', 'ep', 'tp')"),
    "pp": ("ValueError", "mesh dimension 'pp'", "the submesh of that stage, mesh['ep']"),
    "tp, unknown parameter": ("ValueError", "'experts.w' of HandExperts", "accepted: w1 and w3 [E, hidden, dim]"),
    "tp, hidden 33": ("ValueError", "'blocks.0.moe.experts.w1' of shape [4, 33, 16]", "tp sizes: [1, 3, 11, 33]"),
    "tp, no experts": ("ValueError", "no MoE experts were recognised in Linear", "'tp' has size 2"),
    "tp, other pipeline": ("ValueError", "lacks 'tensor-parallel'", "'tp': 2"),
    "tp without ep": ("ValueError", "plan['*.experts'] is ExpertTensorParallel()", "'ep', but the mesh has only"),
    "two styles": ("ValueError", "'blocks.1.moe.experts' is to be split over ['tp']", "over ['ep']"),
    "no cuda": ("ValueError", "'cuda' is not available", "'cpu'"),
    "no npu": ("RuntimeError", "a mesh on npu needs torch_npu, which is not installed", "pip install 'ep_fx[npu]'"),
    "no mesh": ("TypeError", "DeviceMesh", "tuple"),
    "no module": ("TypeError", "torch.nn.Module", "builtin_function_or_method"),
    "no experts": ("ValueError", "no MoE experts were recognised in Linear", "'ep' has size 2"),
    "fully_shard": ("ValueError", "fully_shard was applied to 1 modules, first ''", "units=[...]"),
    "style": ("ValueError", "ExpertParallel() was applied to the experts 'experts'", "plan={'experts': Expe"),
    "DTensor": ("ValueError", "'router.weight' is a DTensor (Replicate(),) already", "plain model"),
    "plan matches nothing": ("ValueError", "'*.expert' matches no module", "['experts']"),
    "plan matches no experts": ("ValueError", "'router' matches ['router'], which are not experts", "['experts']"),
    "plan over tp": ("ValueError", "plan['experts'] is ExpertTensorParallel()", "'tp', but the mesh has only"),
    "plan of text": ("TypeError", "plan['experts']", "'ep'"),
    "plan as list": ("TypeError", "plan must map", "['experts']"),
    "expert_reshard": ("ValueError", "'strict' or 'early'", "'late'"),
    "grad_reduce": ("ValueError", "'mean' or 'sum'", "'avg'"),
    "reshard_after_forward": ("TypeError", "reshard_after_forward must be True or False", "'yes'"),
    "units matches nothing": ("ValueError", "'layers.*' matches no module", "['router', 'experts']"),
    "units as text": ("TypeError", "units must be a sequence", "'experts'"),
    "unknown option": ("TypeError", "unexpected keyword argument", "'prefetch'"),
}
CALLS = {
    "other device": ("ValueError", "'args[0]'", "device meta"),
    "rebound buffer": ("ValueError", "buffer 'calls'", "self.calls.add_("),
    "stored tensor": ("ValueError", "router.last", "stores a tensor on the module"),
}


def _assert_refused(
    raised: list[dict[str, tuple[str, str, int]]], expected: dict[str, tuple[str, str, str]]
) -> None:
    for rank, by_case in enumerate(raised):
        assert by_case.keys() == expected.keys()
        for case, (kind, *parts) in expected.items():
            got, message, groups = by_case[case]
            assert got == kind, f"rank {rank}, {case}: {got}: {message}"
            assert all(part in message for part in parts), f"rank {rank}, {case}: {message}"
            assert groups == 0, f"rank {rank}, {case}: {groups} process groups were made before"


def test_bad_arguments_are_refused_on_every_rank_before_any_group_is_made(ranks: RankPools) -> None:
    _assert_refused(ranks(4).run(arguments), ARGUMENTS)


def test_what_only_a_trace_can_find_is_refused_at_the_first_call(ranks: RankPools) -> None:
    _assert_refused(ranks(4).run(calls), CALLS)
