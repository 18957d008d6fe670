"""torch.ops.npu without torch_npu: it has the kernels' results, and refuses what a kernel refuses (R47)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_fx.testing.npu import recorded
from ep_fx.testing.npu.checks import CHECKS
from ep_fx.testing.npu.reference import REFERENCES
from ep_fx.testing.npu.shim import schemas
from ep_fx.testing.ranks import RankError, RankPool

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _float(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*sizes, dtype=dtype)


def _ids(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _gmm(x: Tensor, weight: Tensor, sizes: Tensor, **options: Any) -> Call:
    options = {"split_item": 3, "group_type": 0, "group_list_type": 1, **options}
    return "npu_grouped_matmul", ([x], [weight]), {"group_list": sizes, **options}


SIZES = _ids(1, 3, dtype=torch.int64)
HALF = torch.bfloat16
WRONG: dict[str, tuple[Call, str]] = {
    "group_list too long": (
        _gmm(_float(4, 2), _float(2, 2, 3), _ids(1, 3, 0, dtype=torch.int64)), "one weight for each of 3 groups"
    ),
    "totals for sizes": (_gmm(_float(4, 2), _float(2, 2, 3), SIZES.cumsum(0)), r"sizes with the sum 4, got \[1, 4\]"),
    "sizes for totals": (_gmm(_float(4, 2), _float(2, 2, 3), SIZES, group_list_type=0), "running totals up to 4"),
    "group_list in int32": (_gmm(_float(4, 2), _float(2, 2, 3), SIZES.int()), "group_list in int64"),
    "no group_type": (_gmm(_float(4, 2), _float(2, 2, 3), SIZES, group_type=None), "group_type 0 or 2, got None"),
    "two dtypes": (_gmm(_float(4, 2), _float(2, 2, 3, dtype=HALF), SIZES), "one dtype for x, weight"),
    "inner size": (_gmm(_float(4, 2), _float(2, 3, 3), SIZES), r"weight \[G, 2, N\]"),
    "no rows": (_gmm(_float(0, 2), _float(2, 2, 3), 0 * SIZES), "a call without rows does not reach a kernel"),
    "not transposed": (_gmm(_float(2, 4), _float(4, 3), SIZES, group_type=2), "x a transposed view"),
    "ids in float": (("npu_moe_token_permute", (_float(2, 4), _float(2)), {}), "indices in int32 or int64"),
    "ids of other tokens": (("npu_moe_token_permute", (_float(2, 4), _ids(0)), {}), "indices of 2 tokens"),
    "tokens in double": (
        ("npu_moe_token_permute", (_float(2, 4, dtype=torch.float64), _ids(0, 0)), {}), "tokens in one of"
    ),
    "index in int64": (
        ("npu_moe_token_unpermute", (_float(2, 4), _ids(0, 1, dtype=torch.int64)), {}), "sorted_indices in int32"
    ),
    "index twice": (("npu_moe_token_unpermute", (_float(2, 4), _ids(0, 0)), {}), "each number below 2 once"),
    "probs of other tokens": (
        ("npu_moe_token_unpermute", (_float(2, 4), _ids(0, 1), _float(2, 2)), {}), r"sorted_indices of shape \(4,\)"
    ),
    "rows without probs' rows": (
        ("npu_moe_token_unpermute_grad_v2", (_float(1, 4), _ids(0, 1), 2, torch.float32, _float(1, 2)), {}),
        "permuted_tokens, beside probs, got None",
    ),
    "odd halves": (("npu_swiglu", (_float(2, 3),), {}), "an even size along -1"),
    "gamma in another dtype": (("npu_rms_norm", (_float(2, 4), _float(4, dtype=HALF)), {}), "one dtype"),
    "rstd in bfloat16": (
        ("npu_rms_norm_backward", (*[_float(2, 4)] * 2, _float(4), _float(2, 1, dtype=HALF)), {}), "rstd in float32"
    ),
    "rotation of another head": (
        ("npu_rotary_mul", (_float(1, 2, 3, 4), *[_float(1, 1, 3, 2)] * 2), {}), "r1 and r2 alike"
    ),
    "mask in float": (
        ("npu_fusion_attention", (*[_float(1, 2, 3, 4)] * 3, 2, "BNSD"), {"atten_mask": _float(3, 3)}),
        "atten_mask in bool or uint8",
    ),
    "another layout": (("npu_fusion_attention", (*[_float(1, 2, 3, 4)] * 3, 2, "BSND"), {}), "layout BNSD"),
    "counts": (
        ("npu_alltoallv_gmm", (_float(4, 2, dtype=HALF), _float(2, 2, 3, dtype=HALF), "", 1, [1, 2], [1, 2]), {}),
        r"send_counts with the sum 4, got \[1, 2\]",
    ),
    "no such communicator": (
        ("npu_alltoallv_gmm", (_float(3, 2, dtype=HALF), _float(2, 2, 3, dtype=HALF), "x", 1, [1, 2], [1, 2]), {}),
        "the communicator of a group of 1 ranks, got 'x', no such group",
    ),
}  # fmt: skip


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [_moved(item, device) for item in value]
    if not isinstance(value, Tensor):
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


def _call(call: Call, device: str = "npu") -> Any:
    name, args, kwargs = call
    moved = [_moved(value, device) for value in args]
    return getattr(torch.ops.npu, name)(*moved, **{key: _moved(value, device) for key, value in kwargs.items()})


def _refusals(rank: int) -> dict[str, str]:
    said = {}
    for case, (call, _) in WRONG.items():
        with pytest.raises(ValueError, match=f"^npu::{call[0]}: ") as error:
            _call(call)
        said[case] = str(error.value)
    return said


@pytest.fixture(scope="module")
def refusals(npu_rank: RankPool) -> dict[str, str]:
    """What each wrong call was told."""
    return npu_rank.run(_refusals)[0]


@pytest.mark.parametrize("case", WRONG)
def test_r47_a_wrong_call_is_refused(refusals: dict[str, str], case: str) -> None:
    with pytest.raises(ValueError, match=WRONG[case][1]):
        raise ValueError(refusals[case])


def _right_calls(rank: int) -> None:
    """As the kernels' references, on the device; a transposed weight and a transposed x are views."""
    x, weight = torch.randn(4, 2), torch.randn(2, 3, 2)
    calls = {
        "forward": _gmm(x, weight.mT, SIZES),
        "weight": _gmm(x.t(), torch.randn(4, 3), SIZES, group_type=2),
        "swiglu": ("npu_swiglu", (x,), {}),
        "permute": ("npu_moe_token_permute", (x, torch.tensor([[1, 0], [0, 2], [2, 1], [0, 1]])), {}),
        "attention": ("npu_fusion_attention", (*[torch.randn(1, 2, 3, 4)] * 3, 2, "BNSD"), {"scale": 0.5}),
    }
    with recorded() as ran:
        for name, args, kwargs in calls.values():
            got, want = _call((name, args, kwargs)), REFERENCES[name](*args, **kwargs)
            for mine, theirs in zip(*(v if isinstance(v, (list, tuple)) else [v] for v in (got, want)), strict=True):
                if isinstance(theirs, Tensor):
                    assert mine.device.type == "npu"
                    assert torch.equal(mine.cpu(), theirs)
    assert {name: count for name, count in ran.items() if name.startswith("npu::")} == {
        "npu::npu_grouped_matmul": 2, "npu::npu_swiglu": 1, "npu::npu_moe_token_permute": 1,
        "npu::npu_fusion_attention": 1,
    }  # fmt: skip
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.npu.npu_swiglu(x)


def _no_gradient_is_lost(rank: int) -> None:
    """torch_npu would return a product without a history."""
    x = torch.ones(4, 2, device="npu", requires_grad=True)
    name, (_, weight), options = _gmm(x, torch.ones(2, 2, 3), SIZES)
    call: Callable[[], Any] = lambda: getattr(torch.ops.npu, name)(  # noqa: E731
        [x], [w.to("npu") for w in weight], **{**options, "group_list": SIZES.to("npu")}
    )
    with pytest.raises(RuntimeError, match=r"npu::npu_grouped_matmul was called with a tensor that requires"):
        call()
    with torch.no_grad():
        call()
    with torch._C._AutoDispatchBelowAutograd():
        call()


def test_a_right_call_gives_what_the_reference_gives(npu_rank: RankPool) -> None:
    npu_rank.run(_right_calls)


def test_no_gradient_is_lost(npu_rank: RankPool) -> None:
    npu_rank.run(_no_gradient_is_lost)


def test_every_operator_has_a_kernel_and_a_check() -> None:
    communicating = {"npu_alltoallv_gmm", "npu_gmm_alltoallv"}
    assert set(schemas()) == set(REFERENCES) | communicating == set(CHECKS)


def _product_and_exchange(rank: int) -> None:
    """The fused kernels on 4 ranks equal the exchange and the product apart, rank 2 without any rows of its own."""
    table = torch.tensor([[1, 0, 2, 3], [0, 0, 1, 2], [0, 0, 0, 0], [0, 2, 0, 1]])  # one expert a rank
    sent, received = table[rank].tolist(), table[:, rank].tolist()
    group = dist.group.WORLD
    assert group is not None
    name = group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    rows = (torch.randn(sum(sent), 8) + rank).to("npu", HALF)
    weight = torch.randn(4, 8, 6)[rank : rank + 1].to("npu", HALF)
    y, nothing, arrived = torch.ops.npu.npu_alltoallv_gmm(
        rows, weight, name, 4, sent, received, permute_out_flag=True
    )
    want = torch.empty(sum(received), 8, dtype=HALF, device="npu")
    dist.all_to_all_single(want, rows, received, sent)
    assert nothing is None
    assert torch.equal(arrived.cpu(), want.cpu())
    torch.testing.assert_close(y.cpu(), (want.cpu().float() @ weight[0].cpu().float()).bfloat16())
    back, _ = torch.ops.npu.npu_gmm_alltoallv(arrived, weight, name, 4, received, sent)
    other = torch.empty(sum(sent), 6, dtype=HALF, device="npu")
    dist.all_to_all_single(other, y, sent, received)
    assert torch.equal(back.cpu(), other.cpu())


def test_products_fused_with_the_exchange(npu_ranks: RankPool) -> None:
    try:
        npu_ranks.run(_product_and_exchange)
    except RankError as error:
        pytest.fail(error.report, pytrace=False)
