"""Lists of experts: what a loop computes is proven or not used, and a stack of parameters does what its experts do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ep_fx.capture.experts import find_experts, stack_experts
from ep_fx.capture.experts.module_list.loop import call_of
from ep_fx.capture.experts.module_list.proof import NotProven, prove
from ep_fx.capture.experts.module_list.source import CALL
from ep_fx.capture.experts.module_list.stacked import StackedExperts
from tests.models.guarded import GUARDED, HARMLESS, Fp16Guard, Guarded, NotCalledSelf
from tests.models.listed import PROVABLE, REFUSED, InModel, Listed, SkipIdle
from tests.oracle import relative_error


@pytest.mark.parametrize("block", PROVABLE, ids=lambda block: block.__name__)
def test_what_a_loop_over_experts_computes_is_proven(block: type[Listed]) -> None:
    proof = prove(block(), "experts")
    assert 3 in proof.ranks
    assert __file__.replace("capture/experts/test_module_list", "models/listed") in proof.where


@pytest.mark.parametrize(("block", "reason"), REFUSED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_no_moe_layer_is_not_taken_for_one(block: type[Listed], reason: str) -> None:
    with pytest.raises(NotProven) as caught:
        prove(block(), "experts")
    assert reason in str(caught.value)


@pytest.mark.parametrize(("block", "reason"), GUARDED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_guard_that_ordinary_tokens_do_not_meet_is_seen(block: type[Listed], reason: str) -> None:
    with pytest.raises(NotProven) as caught:
        prove(block(), "experts")
    assert reason in str(caught.value)
    assert "tests/models/guarded.py" in str(caught.value)


@pytest.mark.parametrize("block", HARMLESS, ids=lambda block: block.__name__)
def test_what_changes_no_number_is_no_hindrance(block: type[Listed]) -> None:
    assert prove(block(), "experts").ranks == {2, 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_loop_is_proven_in_each_dtype(dtype: torch.dtype) -> None:
    assert prove(Guarded().to(dtype), "experts").ranks == {2, 3}


def test_a_guard_for_fp16_is_none_in_fp32() -> None:
    assert prove(Fp16Guard().float(), "experts").ranks == {2, 3}


def test_the_first_argument_of_a_replaced_method_has_any_name() -> None:
    """The method that a capture runs is called, with the experts on their rows."""
    block = NotCalledSelf()
    x = torch.randn(2, 5, 16)
    want = block(x)
    proof = prove(block, "experts")
    object.__setattr__(block, CALL, call_of(_by_rows(block.experts), len(block.experts)))
    assert relative_error(proof.methods["forward"](block, x), want) < 1e-6


def _by_rows(experts: nn.ModuleList) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda rows, counts: torch.cat(
        [expert(part) for expert, part in zip(experts, rows.split(counts.tolist()), strict=True)]
    )


@pytest.mark.parametrize("sizes", [{"num_experts": 16, "top_k": 1}, {"num_experts": 3, "top_k": 3}, {"dim": 24}])
def test_a_proof_needs_no_special_sizes(sizes: dict[str, int]) -> None:
    assert prove(SkipIdle(**sizes), "experts").ranks == {2, 3}


def test_a_proof_touches_no_weight_and_needs_none() -> None:
    block = SkipIdle().to("meta")
    prove(block, "experts")
    assert all(p.device.type == "meta" for p in block.parameters())


class BehindSuper(SkipIdle):
    """Its own forward holds no loop; the one of its base class cannot be replaced on an instance."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def test_a_loop_behind_super_is_refused() -> None:
    with pytest.raises(NotProven, match=r"no method of BehindSuper uses self\.experts"):
        prove(BehindSuper(), "experts")


def test_a_model_that_cannot_be_transformed_keeps_its_lists() -> None:
    model = InModel(SkipIdle)
    before = dict(model.named_parameters())
    stacking = stack_experts(model)
    assert next(iter(stacking.stacks)) == "blocks.0.experts.gate.weight"
    stacking.undo()
    assert all(p is before[name] for name, p in model.named_parameters())


def test_experts_with_parameters_of_their_own_are_no_grouped_experts() -> None:
    """A stack takes rows and counts as grouped experts do, but is one part of its parent, proven or registered."""
    block = SkipIdle(dim=8)
    block.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    model = nn.Sequential(block)
    stacking = stack_experts(model)
    found = find_experts(model, None, {"ep": 2}, stacking.reasons)
    assert [(item.path, item.family) for item in found] == [("0.experts", "module_list")]
    assert found[0].parameters == ("0.experts.weight", "0.experts.bias")


def test_other_lists_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    stacking = stack_experts(model)
    assert (stacking.stacks, stacking.reasons) == ({}, {})


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


WAYS: dict[str, Callable[[_Linear, Tensor], Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.w, m.b),
    "matmul": lambda m, x: x @ m.w + m.b,
    "transposed": lambda m, x: torch.mm(x, m.w.t()) + m.b,
    "mT": lambda m, x: torch.matmul(x, m.w.mT),
    "transpose": lambda m, x: x @ m.w.transpose(0, 1).contiguous(),
    "cast": lambda m, x: x.to(m.w.dtype) @ m.w.to(x.dtype),
    "addmm": lambda m, x: torch.addmm(m.b, x, m.w),
    "vector": lambda m, x: m.b * x + m.b,
    "number": lambda m, x: x * m.scale,
    "scaled": lambda m, x: x * (m.b * 2.0),
    "rms_norm": lambda m, x: F.rms_norm(x, (8,), m.b, 1e-6),
    "layer_norm": lambda m, x: F.layer_norm(x, (8,), m.b, m.b, 1e-6),
    "shape": lambda m, x: F.linear(x, m.w) / m.w.shape[1] + m.w.size(0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_on_stacked_parameters_is_each_expert_on_its_rows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Linear, "forward", WAYS[way])
    experts = nn.ModuleList(_Linear() for _ in range(3))
    stacked = _filled(experts)
    x, counts = torch.randn(7, 8), [4, 0, 3]
    want = torch.cat([expert(rows) for expert, rows in zip(experts, x.split(counts), strict=True)])
    got = stacked(x, torch.tensor(counts))
    assert relative_error(got, want) < 1e-6
    cotangent = torch.randn_like(want)
    got.backward(cotangent)
    want.backward(cotangent)
    for name, p in stacked.named_parameters():
        parts = [expert.get_parameter(name).grad for expert in experts]
        if p.grad is None:
            assert all(part is None or not part.any() for part in parts)
            continue
        filled = [torch.zeros_like(p[0]) if part is None else part for part in parts]
        assert relative_error(p.grad, torch.stack(filled)) < 1e-6


def _filled(experts: nn.ModuleList) -> StackedExperts:
    stacked = StackedExperts(list(experts), "here")
    for name, _ in list(stacked.named_parameters()):
        path, _, leaf = name.rpartition(".")
        parts = [expert.get_parameter(name).detach() for expert in experts]
        stacked.get_submodule(path)._parameters[leaf] = nn.Parameter(torch.stack(parts))
    return stacked


@pytest.mark.parametrize(
    "way",
    [
        lambda m, x: torch.einsum("rd,df->rf", x, m.w),
        lambda m, x: x @ m.w[:, :8],
        lambda m, x: x + m.w,
        lambda m, x: x * m.w.sum(),
    ],
    ids=["einsum", "slice", "matrix", "sum"],
)
def test_what_has_no_form_for_many_experts_is_refused(
    way: Callable[[_Linear, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Linear, "forward", way)
    stacked = _filled(nn.ModuleList(_Linear() for _ in range(3)))
    with pytest.raises(ValueError, match="an expert's forward"):
        stacked(torch.randn(7, 8), torch.tensor([4, 0, 3]))


def test_a_single_expert_is_not_to_be_had() -> None:
    stacked = _filled(nn.ModuleList(_Linear() for _ in range(3)))
    assert len(stacked) == 3
    with pytest.raises(ValueError, match="register the class around it"):
        stacked[0]
    with pytest.raises(ValueError, match="register the class around it"):
        list(stacked)
