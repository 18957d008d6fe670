"""R14, uneven or zero splits on a backend's all-to-all.

Sources: pytorch/pytorch#146468, horovod/horovod#2259, PaddlePaddle/Paddle PR#73875, candle-org/candle PR#119.
Empty sends or receives hang, divide by zero, or are reported as done while zeros come out. Rank 0 sends three rows to
rank 1 and gets one, ranks 2 and 3 have none; then nobody has any. What the graph and the styles call must bring every
row, forward and backward, on both backends; and on an npu mesh a backend that does not is refused before training.
"""
from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ep_fx
from ep_fx.sharding import DisagreementError
from ep_fx.styles.exchange import combine, dispatch
from ep_fx.testing import RankPools, local_mesh
from ep_fx.testing.ranks import Device
from tests.models.hand_moe import HandMoE

RANKS = 4
SENT = {"some": ((0, 3, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)), "none": ((0, 0, 0, 0),) * RANKS}
"""Rows from each rank (outer) to each rank (inner)."""


def _rows(sender: int, count: int, dtype: torch.dtype) -> Tensor:
    return (16 * sender + 1 + torch.arange(2 * count).view(count, 2)).to(dtype)


def _there_and_back(rank: int, table: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    """One expert a rank; each multiplies its rows by its number + 2."""
    mesh = local_mesh(ep=RANKS)
    counts = torch.tensor(table[rank], device=mesh.device_type)
    x = _rows(rank, sum(table[rank]), dtype).to(mesh.device_type).requires_grad_(dtype.is_floating_point)
    routed, mine, _, context = dispatch(HandMoE(), mesh, x, counts)
    want = torch.cat([_rows(sender, table[sender][rank], dtype) for sender in range(RANKS)])
    assert torch.equal(routed.detach().cpu(), want)
    assert mine.tolist() == [len(want)]
    y = combine(HandMoE(), routed * (rank + 2), context, mesh)
    expert = torch.repeat_interleave(torch.arange(RANKS), torch.tensor(table[rank])).unsqueeze(1) + 2
    assert torch.equal(y.detach().cpu(), (x.detach().cpu() * expert).to(dtype))
    if dtype.is_floating_point:
        y.sum().backward()  # on ranks without a row too: their peers wait for them
        assert x.grad is not None
        assert torch.equal(x.grad.cpu(), expert.to(dtype).expand_as(x))


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("table", SENT)
def test_r14_rows_arrive_and_gradients_come_back(
    ranks: RankPools, table: str, dtype: torch.dtype, device: Device
) -> None:
    ranks(RANKS, device).run(_there_and_back, SENT[table], dtype)


# -- a backend that reports success and leaves zeros ------------------------------------------------------------------
class _Zeros:
    """While it is entered, all-to-all on the npu device is done and brings zeros, from the call `after` on."""

    def __init__(self, after: int = 0) -> None:
        self._left = after
        self.calls = 0

    def __enter__(self) -> _Zeros:
        self._library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            self._library.impl("alltoall_base_", self._exchange, "PrivateUse1")
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _exchange(self, output: Tensor, given: Tensor, *rest: Any) -> Any:
        self.calls += 1
        host = torch.empty(output.shape, dtype=output.dtype)
        work = torch.ops.c10d.alltoall_base_(host, given.cpu(), *rest)
        work.wait()
        output.copy_(torch.zeros_like(host) if self.calls > self._left else host)
        return work


def _mesh(**sizes: int) -> DeviceMesh:
    """A mesh with groups of its own, which nobody tried before."""
    return init_device_mesh("npu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _refused(rank: int, after: int) -> tuple[str, str, int]:
    with _Zeros(after) as backend, pytest.raises((RuntimeError, DisagreementError)) as error:
        ep_fx.transform(HandMoE(), _mesh(ep=RANKS))
    return type(error.value).__name__, str(error.value), backend.calls


@pytest.mark.parametrize(("after", "dtype"), [(0, "float32"), (2, "int64")])
def test_r14_a_backend_that_leaves_zeros_is_refused_before_training(ranks: RankPools, after: int, dtype: str) -> None:
    found = ranks(RANKS, "npu").run(_refused, after)
    for rank, (kind, text, calls) in enumerate(found):
        assert kind == ("RuntimeError" if rank < 2 else "DisagreementError")
        assert re.search(rf"backend '[^']*hccl' \(no torch_npu, torch 2\.13\..*torch\.{dtype}", text), text
        assert calls == 3
    assert "expected the rows [[17" in found[0][1]
    assert "got [[0" in found[0][1]
    assert "use another release of CANN and torch_npu" in found[2][1]  # what the ranks that saw nothing are told


def _tried_once(rank: int) -> list[int]:
    """All-to-alls of three transforms: on a mesh, on the same, and on another."""
    calls = []
    first, second = _mesh(ep=RANKS), _mesh(fsdp=2, ep=2)
    for mesh in (first, first, second):
        with _Zeros(after=100) as backend:
            ep_fx.transform(HandMoE(), mesh)
            calls.append(backend.calls)
    return calls


def test_r14_the_probe_is_three_exchanges_once_for_a_group(ranks: RankPools) -> None:
    assert ranks(RANKS, "npu").run(_tried_once) == [[3, 0, 3]] * RANKS

