"""The references of the fused kernels equal plain torch, forward, and backward as autograd has it."""
from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ep_fx.testing.npu.reference import REFERENCES as R
from ep_fx.testing.npu.reference.exchange import Exchange, npu_alltoallv_gmm, npu_gmm_alltoallv

TOKENS, HIDDEN, TOP_K, EXPERTS = 7, 6, 2, 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A gradient of `y`, all different, and what autograd makes of it."""
    grad = torch.randn_like(y)
    return grad, torch.autograd.grad(y, inputs, grad)


def _choices(tokens: int, top_k: int) -> Tensor:
    """The experts of each token; expert 1 is never chosen."""
    order = torch.argsort(torch.rand(tokens, EXPERTS - 1), dim=1)[:, :top_k]
    return torch.tensor([0, 2, 3])[order].to(torch.int32)


def _permuted(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(ids.flatten(), stable=True)
    return x.repeat_interleave(ids.size(1), 0)[order], order


@pytest.mark.parametrize(("tokens", "top_k"), [(TOKENS, TOP_K), (TOKENS, 1), (0, TOP_K)])
def test_permute_and_unpermute(tokens: int, top_k: int) -> None:
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    probs = torch.rand(tokens, top_k, requires_grad=True)
    ids = _choices(tokens, top_k)
    want, order = _permuted(x, ids)
    rows, index = R["npu_moe_token_permute"](x.detach(), ids)
    assert index.dtype is torch.int32
    assert torch.equal(rows, want)
    assert torch.equal(torch.argsort(index), order)
    grad, (grad_x,) = _gradients(want, x)
    got = R["npu_moe_token_permute_grad_v2"](grad, index, tokens, grad.dtype, top_k)
    torch.testing.assert_close(got, grad_x)

    routed = torch.randn(tokens * top_k, HIDDEN, requires_grad=True)
    by_choice = torch.zeros_like(routed).index_copy(0, order, routed).view(tokens, top_k, HIDDEN)
    back = (by_choice * probs.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(R["npu_moe_token_unpermute"](routed.detach(), index, probs.detach()), back.detach())
    grad, (grad_routed, grad_probs) = _gradients(back, routed, probs)
    got_routed, got_probs = R["npu_moe_token_unpermute_grad_v2"](
        grad, index, tokens * top_k, grad.dtype, probs.detach(), False, None, routed.detach()
    )
    torch.testing.assert_close(got_routed, grad_routed)
    torch.testing.assert_close(got_probs, grad_probs)


def test_regroup_by_one_expert_a_row() -> None:
    """1-D ids: what arrives by rank is put in expert order, and back without weights, as the exchange needs it."""
    ids = torch.tensor([0, 2, 2, 0, 1], dtype=torch.int32)
    x = torch.randn(5, HIDDEN)
    rows, index = R["npu_moe_token_permute"](x, ids)
    assert torch.equal(rows, x[[0, 3, 4, 1, 2]])
    assert torch.equal(R["npu_moe_token_unpermute"](rows, index), x)
    assert torch.equal(R["npu_moe_token_permute_grad_v2"](rows, index, 5, x.dtype, 1), x)
    grad, none = R["npu_moe_token_unpermute_grad_v2"](x, index, 5, x.dtype)
    assert torch.equal(grad, rows)
    assert none is None


def test_the_example_of_the_documents() -> None:
    """[DOC]: the inverse permutation, not the order."""
    ids = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 0]], dtype=torch.int32)
    _, index = R["npu_moe_token_permute"](torch.zeros(4, 1), ids)
    assert index.tolist() == [0, 4, 5, 1, 2, 6, 7, 3]


@pytest.mark.parametrize(("wanted", "kept"), [(10, 10), (0, 14), (-3, 11), (99, 14)])
def test_rows_that_are_cut_off_count_as_zeros(wanted: int, kept: int) -> None:
    x, ids = torch.randn(TOKENS, HIDDEN), _choices(TOKENS, TOP_K)
    whole, index = R["npu_moe_token_permute"](x, ids)
    rows, same = R["npu_moe_token_permute"](x, ids, wanted)
    assert torch.equal(rows, whole[:kept])
    assert torch.equal(same, index)
    probs = torch.rand(TOKENS, TOP_K)
    whole[kept:] = 0
    torch.testing.assert_close(
        R["npu_moe_token_unpermute"](rows, index, probs), R["npu_moe_token_unpermute"](whole, index, probs)
    )


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 4), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("kind", [0, 1])
def test_grouped_matmul(counts: Sequence[int], kind: int) -> None:
    """All three products of a linear layer, groups without rows among them, and a bias."""
    groups = torch.tensor(counts)
    x = torch.randn(sum(counts), HIDDEN, requires_grad=True)
    weight = torch.randn(len(counts), HIDDEN, 5, requires_grad=True)
    bias = torch.randn(len(counts), 5)
    y = torch.cat([part @ w + b for part, w, b in zip(x.split(counts), weight, bias, strict=True)])
    grad, (grad_x, grad_weight) = _gradients(y, x, weight)
    options = {"split_item": 3, "group_list_type": kind, "group_list": groups if kind == 1 else groups.cumsum(0)}
    multiply = R["npu_grouped_matmul"]
    a, w = x.detach(), weight.detach()
    torch.testing.assert_close(multiply([a], [w], bias=[bias], group_type=0, **options)[0], y.detach())
    torch.testing.assert_close(multiply([grad], [w.mT], group_type=0, **options)[0], grad_x)
    torch.testing.assert_close(multiply([a.t()], [grad], group_type=2, **options)[0], grad_weight)


@pytest.mark.parametrize(("dim", "shape"), [(-1, (5, 8)), (0, (4, 3)), (-1, (0, 8))])
def test_swiglu(dim: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    gate, up = x.chunk(2, dim)
    y = F.silu(gate) * up
    torch.testing.assert_close(R["npu_swiglu"](x.detach(), dim), y.detach())
    grad, (grad_x,) = _gradients(y, x)
    torch.testing.assert_close(R["npu_swiglu_backward"](grad, x.detach(), dim), grad_x)


@pytest.mark.parametrize("shape", [(2, 5, 8), (0, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    gamma = torch.randn(8, requires_grad=True)
    y = F.rms_norm(x, (8,), gamma, 1e-5)
    got, rstd = R["npu_rms_norm"](x.detach(), gamma.detach(), 1e-5)
    torch.testing.assert_close(got, y.detach())
    assert rstd.shape == (*shape[:-1], 1)
    grad, (grad_x, grad_gamma) = _gradients(y, x, gamma)
    got_x, got_gamma = R["npu_rms_norm_backward"](grad, x.detach(), gamma.detach(), rstd)
    torch.testing.assert_close(got_x, grad_x)
    torch.testing.assert_close(got_gamma, grad_gamma)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary(mode: str) -> None:
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    cos, sin = (torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(2))
    if mode == "half":
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    y = x * cos + turned * sin
    given = (x.detach(), cos.detach(), sin.detach(), mode)
    torch.testing.assert_close(R["npu_rotary_mul"](*given), y.detach())
    grad, wanted = _gradients(y, x, cos, sin)
    for got, want in zip(R["npu_rotary_mul_backward"](grad, *given), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2)])
def test_attention(heads: int, shared: int, masked: bool) -> None:
    query = torch.randn(2, heads, 5, 8, requires_grad=True)
    key = torch.randn(2, shared, 7, 8, requires_grad=True)
    value = torch.randn(2, shared, 7, 6, requires_grad=True)
    left_out = torch.rand(2, 1, 5, 7) < 0.4
    left_out[..., 0] = False  # no row without a key
    mask = left_out if masked else None
    y = F.scaled_dot_product_attention(
        query, key, value, None if mask is None else ~mask, scale=0.3, enable_gqa=heads != shared
    )
    q, k, v = query.detach(), key.detach(), value.detach()
    out, largest, total, *_ = R["npu_fusion_attention"](q, k, v, heads, "BNSD", atten_mask=mask, scale=0.3)
    torch.testing.assert_close(out, y.detach())
    assert largest.shape == total.shape == (2, heads, 5, 8)
    grad, wanted = _gradients(y, query, key, value)
    got = R["npu_fusion_attention_grad"](
        q, k, v, grad, heads, "BNSD", atten_mask=mask, softmax_max=largest, softmax_sum=total, attention_in=out,
        scale_value=0.3,
    )  # fmt: skip
    for mine, theirs in zip(got[:3], wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3)])
def test_causal_attention_counts_from_the_first_query_and_key(queries: int, keys: int) -> None:
    query, key = torch.randn(2, 4, queries, 8, requires_grad=True), torch.randn(2, 4, keys, 8, requires_grad=True)
    y = F.scaled_dot_product_attention(query, key, key, is_causal=True, scale=0.3)
    packed = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    q, k, options = query.detach(), key.detach(), {"atten_mask": packed, "sparse_mode": 2}
    out, largest, total, *_ = R["npu_fusion_attention"](q, k, k, 4, "BNSD", scale=0.3, **options)
    torch.testing.assert_close(out, y.detach())
    grad, (wanted, both) = _gradients(y, query, key)
    dq, dk, dv, *_ = R["npu_fusion_attention_grad"](
        q, k, k, grad, 4, "BNSD", softmax_max=largest, softmax_sum=total, attention_in=out, scale_value=0.3, **options
    )
    torch.testing.assert_close(dq, wanted)
    torch.testing.assert_close(dk + dv, both)


@pytest.mark.parametrize("name", ["npu_swiglu", "npu_moe_token_permute", "npu_grouped_matmul"])
def test_results_have_the_dtype_of_their_input(name: str) -> None:
    x = torch.randn(4, 6).bfloat16()
    calls = {
        "npu_swiglu": lambda: R[name](x),
        "npu_moe_token_permute": lambda: R[name](x, torch.tensor([1, 0, 0, 1]))[0],
        "npu_grouped_matmul": lambda: R[name](
            [x], [torch.randn(1, 6, 2).bfloat16()], group_list=torch.tensor([4]), split_item=3, group_type=0
        )[0],
    }
    assert calls[name]().dtype is torch.bfloat16


# -- kernels that communicate ------------------------------------------------------------------------------------------
COUNTS = torch.tensor([[2, 0, 1, 3], [0, 0, 4, 1]])
"""Rows of each of 2 ranks for each of 4 experts, 2 on a rank."""


def _between(ranks: Sequence[Tensor], splits: Tensor) -> list[Exchange]:
    """For each rank the exchange that gives what the others have in `ranks`."""
    starts = splits.cumsum(1) - splits

    def exchange_for(rank: int) -> Exchange:
        def exchange(rows: Tensor, input_splits: list[int], output_splits: list[int]) -> Tensor:
            assert torch.equal(rows, ranks[rank])
            assert (input_splits, output_splits) == (splits[rank].tolist(), splits[:, rank].tolist())
            parts = [r[s : s + n] for r, s, n in zip(ranks, starts[:, rank], splits[:, rank], strict=True)]
            return torch.cat(parts)

        return exchange

    return [exchange_for(rank) for rank in range(len(ranks))]


def test_exchange_with_a_product_for_unbalanced_routing() -> None:
    weight = torch.randn(4, 6, 5)
    sent = [torch.randn(int(counts.sum()), 6) for counts in COUNTS]
    expert_of = [torch.repeat_interleave(torch.arange(4), counts) for counts in COUNTS]
    splits = COUNTS.view(2, 2, 2).sum(2)
    exchanges = _between(sent, splits)
    for rank, local in enumerate((slice(0, 2), slice(2, 4))):
        received = COUNTS[:, local].flatten().tolist()
        y, rows = npu_alltoallv_gmm(
            exchanges[rank], sent[rank], weight[local], 2, COUNTS[rank].tolist(), received, permute_out_flag=True
        )
        experts = range(4)[local]
        want = [x[ids == e] for e in experts for x, ids in zip(sent, expert_of, strict=True)]
        assert rows is not None
        assert torch.equal(rows, torch.cat(want))
        pairs = zip(want, itertools.chain(*([e, e] for e in experts)), strict=True)
        torch.testing.assert_close(y, torch.cat([x @ weight[e] for x, e in pairs]))


def test_a_product_with_the_exchange_back() -> None:
    """The mirror: rows by expert go through the weights, by rank over the wire, and are where they came from."""
    weight = torch.randn(4, 5, 6)
    origin = [torch.randn(int(counts.sum()), 5) for counts in COUNTS]
    expert_of = [torch.repeat_interleave(torch.arange(4), counts) for counts in COUNTS]
    results = [
        torch.stack([x @ weight[e] for x, e in zip(rows, ids, strict=True)])
        for rows, ids in zip(origin, expert_of, strict=True)
    ]
    for rank, local in enumerate((slice(0, 2), slice(2, 4))):
        mine = torch.arange(4)[local]
        held = [x[ids == e] for e in mine for x, ids in zip(origin, expert_of, strict=True)]

        def exchange(
            rows: Tensor, given: list[int], taken: list[int], rank: int = rank, mine: Tensor = mine
        ) -> Tensor:
            by_rank = [y[torch.isin(ids, mine)] for y, ids in zip(results, expert_of, strict=True)]
            torch.testing.assert_close(rows, torch.cat(by_rank))
            assert given == [len(part) for part in by_rank]
            return results[rank]

        sent, received = COUNTS[:, local].flatten().tolist(), COUNTS[rank].tolist()
        back = npu_gmm_alltoallv(exchange, torch.cat(held), weight[local].mT, 2, sent, received, trans_gmm_weight=True)
        assert torch.equal(back, results[rank])
