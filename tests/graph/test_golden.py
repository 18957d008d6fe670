"""The text of one MoE layer on fsdp 2 x ep 2, whole and line by line where a test is about one thing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import FileCheck

import ep_fx
from ep_fx.testing.fake import fake_world
from ep_fx.testing.golden import Golden, golden_text
from tests.models.tiny_moe import TinyMoE, token_ids


@pytest.fixture(scope="module")
def text() -> Iterator[str]:
    """The graph without what it is not about: source lines, and the numbers of what is computed."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
        yield golden_text(ep_fx.transform(TinyMoE(blocks=1), mesh, example_inputs=(token_ids(0),)))


@pytest.mark.golden
def test_the_whole_text(text: str, graph_golden: Golden) -> None:
    graph_golden(text, "tiny_moe_layer")


def test_experts_are_whole_from_before_dispatch_to_after_combine(text: str) -> None:
    forward, backward = text.split("\nbackward:\n")
    check = FileCheck().check("# gather blocks.0.moe.experts").check('ep_fx.unshard([%p3, %p4, %p5], 2, "fsdp")')
    check = check.check("# dispatch blocks.0.moe.experts").check("dispatch_context(").check("ep_fx.regroup(")
    check = check.check("# combine blocks.0.moe.experts").check("ep_fx.pad_rows(")
    check.check("# free blocks.0.moe.experts").run(forward)
    check = FileCheck().check("# combine backward blocks.0.moe.experts").check("ep_fx.regroup(")
    check.check("# reduce gradients of blocks.0.moe.experts").check("ep_fx.reduce_grad(").run(backward)


def test_the_context_goes_from_dispatch_to_combine_and_to_both_backwards(text: str) -> None:
    out, back = "%context.output_splits, %context.input_splits", "%context.input_splits, %context.output_splits"
    check = FileCheck().check_count("%context = dispatch_context(", 1, exactly=True)
    check = check.check(f"c10d.all_to_all_single(%send_rows, {out}").check(f"c10d.all_to_all_single(%ungroup, {back}")
    check = check.check("backward:").check(f"c10d.all_to_all_single(%send_rows_1, {out}")
    check.check(f"c10d.all_to_all_single(%ungroup_1, {back}").run(text)


def test_every_gradient_is_reduced_once_and_divided_by_the_number_of_data_ranks(text: str) -> None:
    backward = text.split("\nbackward:\n")[1]
    FileCheck().check_count("= ep_fx.reduce_grad(", 3, exactly=True).run(backward)
    FileCheck().check_count(", 4.0)", 3, exactly=True).run(backward)
    FileCheck().check_not("all_reduce_grad").run(text)
