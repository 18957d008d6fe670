"""Liveness: bytes of gathered parameters after each node, from the graph and the Manifest alone."""
from __future__ import annotations

from typing import Any

import pytest

from ep_fx.cost.liveness import gathered_bytes, live_unsharded_bytes, peak, peaks
from ep_fx.graph import Phase
from tests.verify.builder import DIM, Step

DENSE = 8 * DIM * 4
EXPERT = 2 * DIM * DIM * 4
"""Bytes of one expert parameter with 2 of 4 experts on a rank."""


def alive(step: Step) -> dict[str, int]:
    return {node.name: size for node, size in live_unsharded_bytes(step.graph)}


def test_bytes_rise_at_unshard_and_fall_at_reshard() -> None:
    after = alive(Step())
    assert after["x"] == 0
    assert after["unshard_first_forward"] == after["h"] == DENSE
    assert after["reshard_first_forward"] == 0
    assert after["unshard_block_experts_forward"] == after["dispatch"] == after["combine_end"] == 2 * EXPERT
    assert after["reshard_block_experts_forward"] == after["y"] == 0
    assert after["out"] == DENSE
    assert after["output"] == 0


def test_early_policy_frees_before_combine() -> None:
    after = alive(Step(policy="early"))
    assert after["down"] == 2 * EXPERT
    assert after["combine"] == 0


def test_assembled_copies_count_and_blocks_end_with_their_last_reader() -> None:
    step = Step(rows=6)
    padded, whole = 8 * DIM * 4, 6 * DIM * 4
    after = alive(step)
    assert after["unshard_first_forward"] == after["full_first_weight_forward"] == padded
    assert after["whole_first_weight_forward"] == after["h"] == whole
    assert after["reshard_first_forward"] == 0
    assert gathered_bytes(step.by_name["first.weight"]) == padded


def test_peaks_of_both_halves() -> None:
    step = Step()
    both = peaks(step.graph)
    assert both[Phase.FORWARD] == (2 * EXPERT, 1, step["unshard_block_experts_forward"])
    assert both[Phase.BACKWARD] == (2 * EXPERT, 1, step["unshard_block_experts_backward"])
    assert peak(step.graph) == both[Phase.FORWARD]


def test_what_forward_keeps_is_alive_in_backward() -> None:
    step = Step(keep=True)
    both = peaks(step.graph)
    assert both[Phase.FORWARD].bytes == 2 * EXPERT + DENSE
    assert both[Phase.FORWARD].units == 2
    assert both[Phase.BACKWARD].bytes == 2 * EXPERT + DENSE
    assert alive(step)["output"] == 0


def test_hoisted_gathers_raise_the_peak() -> None:
    """Numbers stay right when every gather moves to the top; only memory shows it."""
    step = Step()
    for name in ("unshard_last_forward", "unshard_block_experts_forward"):
        step["unshard_first_forward"].append(step[name])
    both = peaks(step.graph)
    assert both[Phase.FORWARD].units == 3
    assert both[Phase.FORWARD].bytes == 2 * EXPERT + 2 * DENSE
    assert both[Phase.BACKWARD].units == 1


@pytest.mark.parametrize(
    "options", [{"sharded": False}, {"fsdp": 1, "ep": 1}, {"backward": False, "sharded": False}], ids=str
)
def test_a_graph_that_gathers_nothing(options: dict[str, Any]) -> None:
    graph = Step(**options).graph
    assert peak(graph) == (0, 0, None)
    assert all(size == 0 for _, size in live_unsharded_bytes(graph))
    assert set(peaks(graph)) == ({Phase.FORWARD} if "backward" in options else set(Phase))


def test_a_leak_stays_alive_to_the_end() -> None:
    step = Step()
    step.fx.erase_node(step["reshard_first_forward"])
    assert alive(step)["output"] == DENSE
