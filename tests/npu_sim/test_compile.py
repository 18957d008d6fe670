"""Back ends of torch.compile on the emitted forward, as far as they run without an NPU."""
from __future__ import annotations

import pytest

from ep_fx.testing import RankError, RankPools
from tests.npu_sim.compiled import compare

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("backend", "dim"), [("aot_eager", "ep"), ("npugraph_ex", "fsdp")])
def test_the_compiled_forward_gives_the_same_bits(ranks: RankPools, backend: str, dim: str) -> None:
    for names, difference in ranks(2).run(compare, backend, dim, timeout=100):
        assert {"npu.npu_grouped_matmul.default", "npu.npu_moe_token_permute.default"} <= set(names)
        assert difference == 0


def test_npugraph_ex_does_not_take_an_exchange_of_unknown_sizes(ranks: RankPools) -> None:
    """Its own all_to_all_single asks whether rows are 0 in number while it traces; when this fails, say so in docs."""
    with pytest.raises(RankError, match="data-dependent expression"):
        ranks(2).run(compare, "npugraph_ex", "ep", timeout=100)
