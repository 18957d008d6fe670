"""The npu device of the tests behaves as a device does: each probe runs in a process that has it."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from ep_fx.testing.npu import ForbiddenError, forbidden, install, only, recorded
from ep_fx.testing.ranks import RankError, RankPool, run_ranks


def _parameters_and_views(rank: int) -> None:
    weight = nn.Parameter(torch.arange(6.0, device="npu").view(2, 3))
    assert (weight.device.type, weight.is_leaf, weight[1].device.type) == ("npu", True, "npu")
    with torch.no_grad():
        weight[1].mul_(2)
        weight.t()[0].add_(10)
        weight.detach().reshape(-1)[1:3] = -1
    assert weight.tolist() == [[10, -1, -1], [16, 8, 10]]
    for view in (weight[1:], weight.t(), weight.view(3, 2), weight.detach(), weight.unfold(1, 2, 1)):
        assert view.untyped_storage()._cdata == weight.untyped_storage()._cdata
    assert repr(weight.detach()[0]) == "tensor([10., -1., -1.], device='npu:0')"


def _autograd_and_adamw(rank: int) -> None:
    """Three steps of a model, and of its copy on the CPU."""
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 3))
    device = copy.deepcopy(host).to("npu")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (host, device)]
    for _ in range(3):
        x = torch.randn(5, 4)
        nn.functional.cross_entropy(host(x), torch.arange(5) % 3).backward()
        nn.functional.cross_entropy(device(x.to("npu")), torch.arange(5, device="npu") % 3).backward()
        for p, q in zip(host.parameters(), device.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(q.grad.cpu(), p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())


def _writes_in_place(rank: int) -> None:
    x = torch.zeros(4, device="npu", requires_grad=True)
    y = x * 1
    y[torch.tensor([0, 2], device="npu")] = torch.ones(2, device="npu")
    y.sum().backward()
    assert x.grad is not None
    assert (y.tolist(), x.grad.tolist()) == ([1, 0, 1, 0], [0, 1, 0, 1])
    counts = torch.zeros(3, dtype=torch.int64, device="npu")
    ids = torch.tensor([0, 2, 2], device="npu")
    assert counts.scatter_add_(0, ids, torch.ones_like(ids)) is counts
    assert counts.tolist() == [1, 0, 2]
    saved = torch.ones(2, device="npu", requires_grad=True)
    product = saved * 2
    square = product * product
    product.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def _empty_tensors(rank: int) -> None:
    x = torch.empty(0, 4, device="npu", requires_grad=True)
    y = (x @ torch.ones(4, 2, device="npu")).sum() + torch.cat([x, torch.ones(1, 4, device="npu")]).sum()
    y.backward()
    assert x.grad is not None
    assert (y.item(), x.grad.shape, x.grad.device.type) == (4, (0, 4), "npu")


def _copies(rank: int) -> None:
    source = torch.arange(3.0)
    x = source.to("npu")
    source.add_(1)
    assert x.tolist() == [0, 1, 2]
    back = x.cpu()
    x.mul_(5)
    assert back.tolist() == [0, 1, 2]
    assert x.to(torch.bfloat16).dtype is torch.bfloat16
    assert source.copy_(x).tolist() == [0, 5, 10]
    assert torch.empty(3, device="npu").copy_(source).tolist() == [0, 5, 10]
    assert x.to("npu:0") is x
    twin = copy.deepcopy(x)
    x.zero_()
    assert twin.tolist() == [0, 5, 10]


def _conjugates_and_negatives_that_are_views(rank: int) -> None:
    """A view that stands for the conjugate, or the negative, of its memory: read, written, copied, differentiated."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    x = z.to("npu")
    views = {
        "conj": (x.conj(), z.conj()),
        "neg": (x.conj().imag, z.conj().imag),
        "both": (torch._neg_view(x.conj()), -z.conj()),
        "part": (x.conj()[1:], z.conj()[1:]),
    }
    assert [(v.is_conj(), v.is_neg()) for v, _ in views.values()] == [
        (True, False), (False, True), (True, True), (True, False)
    ]  # fmt: skip
    for name, (view, want) in views.items():
        for got in (view, view.cpu(), view * 1, view.clone(), view.resolve_conj().resolve_neg(), view.reshape(-1),
                    torch.cat([view]), view.contiguous(), torch.empty_like(view).copy_(view)):  # fmt: skip
            assert got.tolist() == want.tolist(), name
    assert z.conj().to("npu").tolist() == z.conj().tolist()
    assert torch._neg_view(z.real).to("npu").tolist() == [-1, -3]
    assert torch.ones(2, dtype=z.dtype, device="npu").copy_(z.conj()).tolist() == z.conj().tolist()
    x.conj().copy_(torch.tensor([5 + 6j, 7j]))
    assert x.tolist() == [5 - 6j, -7j]
    x.conj().imag.mul_(2)
    assert x.tolist() == [5 - 12j, -14j]
    leaf = z.to("npu").requires_grad_()
    torch.view_as_real(leaf * leaf.detach().conj()).select(-1, 1).sum().backward()
    host = z.clone().requires_grad_()
    torch.view_as_real(host * host.detach().conj()).select(-1, 1).sum().backward()
    assert leaf.grad is not None
    assert host.grad is not None
    assert leaf.grad.tolist() == host.grad.tolist()


def _traces(rank: int) -> None:
    """A trace with fake tensors of the device runs on the device."""

    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((x @ w).relu().sum(), (x, w))

    x, w = (torch.randn(3, 3, device="npu", requires_grad=True) for _ in range(2))
    graph = make_fx(step, tracing_mode="symbolic")(x, w)
    for got, want in zip(graph(x, w), step(x, w), strict=True):
        torch.testing.assert_close(got.cpu(), want.cpu())


def _lists_of_tensors(rank: int) -> None:
    parts = [torch.full((2,), 3.0, device="npu"), torch.ones(1, device="npu")]
    assert [part.tolist() for part in torch._foreach_div(parts, 2.0)] == [[1.5, 1.5], [0.5]]
    torch._foreach_mul_(parts, 2.0)
    assert [part.tolist() for part in parts] == [[6, 6], [2]]
    assert [part.shape[0] for part in torch.split(parts[0], [2, 0])] == [2, 0]


def _autocast_of_the_cpu_is_none_of_its_own(rank: int) -> None:
    x = torch.full((2, 2), 1.001, device="npu")
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.float32
        assert (x.cpu() @ x.cpu()).dtype is torch.bfloat16


def _refuses_other_devices(rank: int) -> None:
    x = torch.ones(2, device="npu")
    for wrong in (lambda: x + torch.ones(2), lambda: x.index_select(0, torch.tensor([0]))):
        with pytest.raises(RuntimeError, match=r"expected all tensors on npu:0, got one of shape .* on cpu"):
            wrong()
    with pytest.raises(RuntimeError, match="there is no npu:1"):
        torch.ones(2, device="npu:1")
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]


def _what_is_freed_is_nan(rank: int) -> None:
    """`ep_fx::reshard` frees the memory of every view; a use afterwards is seen."""
    for dtype in (torch.float32, torch.bfloat16):
        gathered = torch.ones(2, 2, dtype=dtype, device="npu")
        view, other = gathered.view(4), torch.ones(2, device="npu")
        torch.ops.ep_fx.reshard([gathered])
        assert view.isnan().all()
        assert not other.isnan().any()
    with pytest.raises(NotImplementedError, match="resized an argument"):
        torch.ones(2, device="npu").resize_(1)


def _is_watched(rank: int) -> None:
    x = torch.ones(2, 2, device="npu")
    with recorded() as calls, only({"aten.mm.default"}):
        x @ x @ x
        with pytest.raises(ForbiddenError, match=r"aten\.silu\.default is no kernel of the device"):
            nn.functional.silu(x)
    assert calls == {"aten::mm": 2, "aten::silu": 1}
    with forbidden("aten::mm"), pytest.raises(ForbiddenError, match="aten::mm is forbidden"):
        x @ x
    x @ x
    assert calls["aten::mm"] == 2


PROBES = [
    _parameters_and_views, _autograd_and_adamw, _writes_in_place, _empty_tensors, _copies, _traces, _lists_of_tensors,
    _conjugates_and_negatives_that_are_views, _autocast_of_the_cpu_is_none_of_its_own, _refuses_other_devices,
    _what_is_freed_is_nan, _is_watched,
]  # fmt: skip


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__.strip("_"))
def test_the_device(npu_rank: RankPool, probe: Callable[[int], None]) -> None:
    try:
        npu_rank.run(probe)
    except RankError as error:
        pytest.fail(error.report, pytrace=False)


def test_this_process_has_no_device() -> None:
    assert not hasattr(torch, "npu")


def _in_the_way(rank: int) -> str:
    torch.utils.rename_privateuse1_backend("other")
    with pytest.raises(RuntimeError) as error:
        install()
    return str(error.value)


def test_another_device_is_in_the_way() -> None:
    """As where torch_npu was imported: PyTorch has room for one device that is not its own."""
    (said,) = run_ranks(_in_the_way, 1)
    assert "this one has a device called 'other' already" in said
