"""Conditions of the exchange that is fused with a grouped product, on A3 only."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from ep_fx.targets.npu.preconditions.build import HALVES, Op, Size, Words, count, dim, number, place, product
from ep_fx.targets.npu.preconditions.condition import Arguments, Condition, Seen

WORLD_SIZES = (8, 16, 32, 64, 128)
MAX_LOCAL_EXPERTS, MAX_EXPERTS, MIN_BYTES, MAX_NAME = 32, 256, 2 << 20, 127
_words = Words("torch_npu 2.13.0 _op_plugin_docs.py")
_aclnn = Words("CANN ops-transformer, aclnnAlltoAllvGroupedMatMul / aclnnGroupedMatMulAlltoAllv")


def _soc(arguments: Arguments) -> Seen:
    soc = arguments["soc"]
    return Seen(None if soc is None else soc == "A3", soc or "a chip that is not known")


def _summed(name: str) -> Size:
    def of(arguments: Arguments) -> Any:
        value = place(arguments, name)
        return sum(value) if isinstance(value, (list, tuple)) and None not in value else None

    return Size(f"sum({name})", of)


def _traffic(arguments: Arguments) -> Seen | None:
    """Always left to the run: ranks have other numbers of rows, and must not decide each for itself."""
    x = place(arguments, "gmm_x")
    return Seen(None, f"gmm_x of {x.numel() * x.element_size()} bytes") if isinstance(x, Tensor) else None


def _rows_of_weight(arguments: Arguments) -> Seen | None:
    x, weight = place(arguments, "gmm_x"), place(arguments, "gmm_weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dim() != 2 or weight.dim() != 3:
        return None
    k = weight.shape[2 if arguments["trans_gmm_weight"] else 1]
    return Seen(k == x.shape[1], f"K = {k}, gmm_x has {x.shape[1]} columns")


def _name(arguments: Arguments) -> Seen:
    hcom = arguments["hcom"]
    return Seen(isinstance(hcom, str) and 0 < len(hcom) <= MAX_NAME, repr(hcom))


_all_experts = product(dim("gmm_weight", 0), number("ep_world_size"))


_conditions = (
    _words.that("soc", "A3", _soc, "leave the exchange unfused, or say NpuOptions(soc='A3')"),
    _words.dtype("gmm_x", *HALVES),
    _words.same_dtype("gmm_weight", "gmm_x"),
    _words.rank("gmm_x", 2),
    _words.rank("gmm_weight", 3),
    _words.that("gmm_weight", "the columns of gmm_x", _rows_of_weight, "set trans_gmm_weight for [e, N, K]"),
    _words.that("hcom", f"a name of 1 to {MAX_NAME} characters", _name, "pass get_hccl_comm_name(rank)"),
    _aclnn.value("ep_world_size", *WORLD_SIZES),
    _aclnn.at_most(dim("gmm_weight", 0), MAX_LOCAL_EXPERTS, "local experts"),
    _aclnn.at_most(_all_experts, MAX_EXPERTS, "experts over all ranks"),
    *(
        _words.equal(count(name), _all_experts, "a count for each rank and local expert",
                     "pass e * ep_world_size counts, by rank and then by expert")
        for name in ("send_counts", "recv_counts")
    ),
    _aclnn.equal(_summed("send_counts"), dim("gmm_x", 0), "the counts add up to the rows"),
    Condition("gmm_x", f"at least {MIN_BYTES} bytes a rank", MIN_BYTES, "bytes", _aclnn.source,
              "give each rank more tokens, or leave the exchange unfused", _traffic),
    _words.absent("send_counts_tensor", "recv_counts_tensor", "mm_x", "mm_weight", "comm_mode"),
    _words.value("trans_mm_weight", False),
)


_PARAMETERS = (
    "gmm_x gmm_weight hcom ep_world_size send_counts recv_counts send_counts_tensor recv_counts_tensor mm_x mm_weight "
    "trans_gmm_weight=False trans_mm_weight=False"
)
OPS = (
    Op("npu_alltoallv_gmm", f"{_PARAMETERS} permute_out_flag=False comm_mode", _conditions),
    Op("npu_gmm_alltoallv", f"{_PARAMETERS} comm_mode", _conditions),
)
