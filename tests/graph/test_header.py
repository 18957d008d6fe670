"""How a parameter's layout is written, and read again."""
from __future__ import annotations

import pytest
import torch

from ep_fx.graph import Layout, ParameterSpec
from ep_fx.graph.header import parameter_facts, read_parameter

CUTS = {
    (4, 4): "2 x 4",
    (3, 2, 3, 2): "3 + 2 + 3 + 2",
    (16, 16, 16, 10): "3 x 16 + 10",
    (1,) * 1000 + (0,) * 24: "1000 x 1 + 24 x 0",
}


@pytest.mark.parametrize("sizes", CUTS, ids=list(CUTS.values()))
def test_equal_neighbours_among_the_shards_of_many_ranks_are_written_together(sizes: tuple[int, ...]) -> None:
    shape = (sum(sizes), 8)
    layout = Layout(shape, shape, False, ("fsdp",), 0, sizes)
    spec = ParameterSpec("w", "param_w", torch.bfloat16, True, layout, "root")
    text = parameter_facts(spec, False)
    assert text == f"bf16[{shape[0]}, 8], dim 0 cut {CUTS[sizes]} over fsdp; unit root"
    assert read_parameter(text, "w", "param_w") == (spec, False)
