"""Rule `partial` on captured graphs with tp 2: a sum that is forgotten, repeated or misplaced is seen, and bodies of
experts that cannot be cut are refused."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

import ep_fx
from ep_fx.graph import ParallelGraph, Role, is_backward, role_of
from ep_fx.testing import fake_mesh
from ep_fx.verify import VerificationError, verify
from tests.capturing import captured
from tests.models.moe import MoE
from tests.models.tiny_moe import Router, TinyMoE, token_ids
from tests.verify.breaking import Breaks, Case, Edit, erase, replace_argument

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(fsdp=2, ep=2, tp=2) as found:
        yield found


@pytest.fixture(scope="module")
def graph(mesh: DeviceMesh) -> ParallelGraph:
    model = TinyMoE(blocks=1, grouped=True, scores="keyword", score="before")
    return ep_fx.transform(model, mesh, example_inputs=(token_ids(0),)).graph


# -- broken graphs -----------------------------------------------------------------------------------------------------
broken = Breaks("partial")
GraphEdit = Callable[[ParallelGraph], None]


def breaks(edit: GraphEdit) -> GraphEdit:
    broken.cases.append(Case("partial", cast(Edit, edit), {}))
    return edit


def sums(graph: ParallelGraph, *, backward: bool = False) -> list[fx.Node]:
    return [n for n in graph.nodes(Role.ALL_REDUCE) if is_backward(n) is backward]


def wait_of(node: fx.Node) -> fx.Node:
    return next(iter(node.users))


def drop(node: fx.Node) -> None:
    erase(wait_of(node), instead=node.all_input_nodes[0])
    node.graph.erase_node(node)


def summed(graph: ParallelGraph, value: fx.Node, group: str) -> fx.Node:
    """`value` after one more sum, for all who read it."""
    users = list(value.users)
    with graph.graph.inserting_after(value):
        started = graph.call(c10d.all_reduce.default, value, "sum", group, like=value, value=value.meta["val"])
    with graph.graph.inserting_after(started):
        done = graph.call(c10d.wait_tensor.default, started, like=value, value=value.meta["val"])
    for user in users:
        user.replace_input_with(value, done)
    return done


@breaks
def the_outputs_are_not_summed(graph: ParallelGraph) -> None:
    drop(sums(graph)[0])


@breaks
def the_gradient_of_the_rows_is_not_summed(graph: ParallelGraph) -> None:
    drop(next(n for n in sums(graph, backward=True) if n.meta["val"].dim() == 2))


@breaks
def the_gradient_of_the_scores_is_not_summed(graph: ParallelGraph) -> None:
    drop(next(n for n in sums(graph, backward=True) if n.meta["val"].dim() == 1))


@breaks
def the_outputs_are_summed_over_another_dimension(graph: ParallelGraph) -> None:
    replace_argument(sums(graph)[0], 2, graph.manifest.mesh.group("fsdp"))


@breaks
def the_gradient_is_summed_over_another_dimension(graph: ParallelGraph) -> None:
    replace_argument(sums(graph, backward=True)[0], 2, graph.manifest.mesh.group("fsdp"))


@breaks
def the_outputs_are_summed_twice(graph: ParallelGraph) -> None:
    summed(graph, wait_of(sums(graph)[0]), graph.manifest.mesh.group("tp"))


@breaks
def the_gradient_is_summed_twice(graph: ParallelGraph) -> None:
    summed(graph, wait_of(sums(graph, backward=True)[0]), graph.manifest.mesh.group("tp"))


@breaks
def the_greatest_is_taken_instead(graph: ParallelGraph) -> None:
    replace_argument(sums(graph)[0], 1, "max")


@breaks
def a_gradient_of_a_cut_parameter_is_summed(graph: ParallelGraph) -> None:
    product = graph.nodes(Role.GROUPED_MM_BACKWARD)[0]
    of_weight = next(u for u in product.users if u.args[1] == 1)
    summed(graph, of_weight, graph.manifest.mesh.group("tp"))


@breaks
def a_value_that_all_ranks_have_is_summed(graph: ParallelGraph) -> None:
    summed(graph, graph.nodes(Role.REGROUP)[0], graph.manifest.mesh.group("tp"))


@breaks
def a_gate_follows_before_the_sum(graph: ParallelGraph) -> None:
    start = sums(graph)[0]
    with graph.graph.inserting_before(start):
        gated = graph.call(aten.relu.default, start.args[0], like=start, value=start.meta["val"])
    replace_argument(start, 0, gated)


@breaks
def the_hidden_features_are_summed_too_early(graph: ParallelGraph) -> None:
    inner = next(n for n in graph if n.target is aten.silu.default)
    summed(graph, inner, graph.manifest.mesh.group("tp"))


@breaks
def a_dense_gradient_is_summed_too(graph: ParallelGraph) -> None:
    start = next(n for n in graph.nodes(Role.REDUCE_GRAD) if graph.manifest.mesh.dims_of(str(n.args[2])) != ("fsdp",))
    summed(graph, start.all_input_nodes[0], graph.manifest.mesh.group("tp"))


@pytest.mark.parametrize("case", broken.cases, ids=lambda case: case.edit.__name__)
def test_is_caught(case: Case, graph: ParallelGraph) -> None:
    assert verify(graph).ok
    edited = graph.copy()
    case.edit(cast(Any, edited))
    edited.graph.lint()
    report = verify(edited)
    assert "partial" in report.broken, report.broken
    assert "  remedy " in report.explain()


def test_every_sum_counts_before_lowering_too(mesh: DeviceMesh) -> None:
    _, logical = captured(TinyMoE(blocks=1, grouped=True), mesh, token_ids(0))
    assert verify(logical).ok
    assert len(logical.nodes(Role.TP_SUM)) == len(logical.nodes(Role.TP_SHARE)) == 2
    for index in range(2):
        twin = logical.copy()
        node = twin.nodes(Role.TP_SUM)[index]
        erase(node, instead=node.all_input_nodes[0])
        assert "partial" in verify(twin).broken


# -- bodies that cannot be cut -----------------------------------------------------------------------------------------
class Body(nn.Module):
    """Grouped experts with another body."""

    def __init__(self, num_experts: int = 4, dim: int = 16, hidden: int = 32, wide: int = 1) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden * wide, dim))
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden, dim))

    def into(self, x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        return F.grouped_mm(x, w.transpose(-2, -1), offs=counts.cumsum(0).int())

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        raise NotImplementedError


class Fused(Body):
    """Gate and up-projection in w1, which nobody said."""

    def __init__(self) -> None:
        super().__init__(wide=2)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        gate, up = self.into(x, self.w1, num_tokens_per_expert).chunk(2, -1)
        return self.into(F.silu(gate) * up + self.w3.sum() * 0, self.w2, num_tokens_per_expert)


class Normed(Body):
    """A norm over the hidden features."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        h = self.into(x, self.w1, num_tokens_per_expert) * self.into(x, self.w3, num_tokens_per_expert)
        return self.into(F.rms_norm(h, h.shape[-1:]), self.w2, num_tokens_per_expert)


class Bounded(Body):
    """A bound on the outputs, inside."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        h = self.into(x, self.w1, num_tokens_per_expert) * self.into(x, self.w3, num_tokens_per_expert)
        return self.into(h, self.w2, num_tokens_per_expert).tanh()


def model(experts: nn.Module) -> nn.Module:
    return MoE(Router(16, 4), experts, 2)


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("body", [Fused, Normed, Bounded])
def test_a_body_that_cannot_be_cut_is_refused_even_without_the_verifier(
    body: type[Body], verified: bool, mesh: DeviceMesh
) -> None:
    with pytest.raises(VerificationError, match=r"rule partial[\s\S]*test_partial.py"):
        ep_fx.transform(model(body()), mesh, example_inputs=(torch.randn(6, 16),), verify=verified)


@pytest.mark.parametrize("body", [Fused, Normed, Bounded])
def test_the_same_body_is_fine_where_it_stays_whole(body: type[Body], mesh: DeviceMesh) -> None:
    plan = {"experts": ep_fx.ExpertParallel()}
    module = ep_fx.transform(model(body()), mesh, plan=plan, example_inputs=(torch.randn(6, 16),))
    assert module.verify().ok
    assert not [n for n in module.graph if role_of(n) is Role.ALL_REDUCE]
