"""Arguments and targets as text: whatever an argument may be reads back as the same value of the same kind."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from ep_fx import ops
from ep_fx.graph.literals import Reader, Writer
from ep_fx.graph.operators import find_target, target_text

WRITER = Writer(lambda node: node.name, str)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(2**63 - 1),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.sampled_from([torch.float32, torch.uint16, torch.float8_e5m2, torch.bool, torch.strided, torch.channels_last]),
    st.just(...),
    st.builds(torch.device, st.sampled_from(["cpu", "cuda:1", "meta"])),
)
WHOLE = st.one_of(st.none(), st.integers())
VALUES = st.recursive(
    st.one_of(SCALARS, st.builds(slice, WHOLE, WHOLE, WHOLE)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), SCALARS, max_size=3),
    ),
    max_leaves=8,
)


def kinds(value: Any) -> Any:
    """Types all the way down: ``1 == True`` is not enough."""
    if isinstance(value, (list, tuple)):
        return type(value), [kinds(item) for item in value]
    if isinstance(value, dict):
        return [(kinds(k), kinds(v)) for k, v in value.items()]
    return type(value)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_arguments_read_back(value: Any) -> None:
    text = WRITER.value(value)
    assert "\n" not in text
    reader = Reader(f"{text})", {})
    read = reader.value()
    assert reader.rest() == ")"
    assert read == value
    assert kinds(read) == kinds(value)


def test_nan_reads_back_and_an_object_does_not() -> None:
    assert math.isnan(Reader(WRITER.value(math.nan), {}).value())
    with pytest.raises(ValueError, match="expected an argument at '<object>"):
        Reader(WRITER.value(object()), {}).value()


def test_runs_of_parameters_read_back_to_their_nodes() -> None:
    graph = fx.Graph()
    nodes = {f"%p{i}": graph.placeholder(f"p{i}") for i in range(8)} | {"%x.1": graph.placeholder("x")}
    written = [nodes[name] for name in ("%p0", "%p2", "%p3", "%p4", "%p5", "%x.1", "%p7")]
    text = Writer({node: name[1:] for name, node in nodes.items()}.__getitem__, str).value(written)
    assert text == "[%p0, %p2..%p5, %x.1, %p7]"
    assert Reader(text, nodes).value() == written
    with pytest.raises(ValueError, match="no value %p8"):
        Reader("[%p6..%p9]", nodes).value()
    with pytest.raises(ValueError, match=r"expected the last of the nodes that %p6\.\. begins"):
        Reader("[%p6..%x.1]", nodes).value()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (torch.ops.aten.mm.default, "aten.mm"),
        (torch.ops.aten.add_.Scalar, "aten.add_.Scalar"),
        (torch.ops.aten.sym_size.int, "aten.sym_size.int"),
        (torch.ops.ep_fx.unshard.default, "ep_fx.unshard"),
        (torch.ops._c10d_functional.wait_tensor.default, "c10d.wait_tensor"),
        (operator.mul, "mul"),
        (operator.floordiv, "floordiv"),
        (ops.dispatch_context, "dispatch_context"),
        (math.floor, "math.floor"),
        (max, "builtins.max"),
        (torch.sym_float, "torch.sym_float"),
    ],
)
def test_targets_read_back(target: Any, text: str) -> None:
    assert target_text(target) == text
    assert find_target(text) is target


@pytest.mark.parametrize(
    "text",
    ["eval", "builtins.eval", "torch.load", "torch.ops", "math", "os.system", "setitem", "attrgetter", "aten.nothing"],
)
def test_nothing_but_operators_and_arithmetic_can_be_named(text: str) -> None:
    with pytest.raises(ValueError, match="no operator"):
        find_target(text)
