"""Types as text: the value that is made of a text has that type, with its strides, device and formula of sizes."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ep_fx.graph.fakes import Fakes
from ep_fx.graph.values import SymbolNames

TYPES = [
    "f32[]", "bf16[3, s0, 64]", "i64[u0]", "bool[2]", "f8[0, 3]".replace("f8", "float8_e4m3fn"), "f32[2*s0*s1, 16]",
    "f32[16, s0*s1]{1, 16}", "f32[s0, 2, 16]{16, 0, 1}", "f32[2, u0, 4]{4*Max(1, u0), 4, 1}", "f32[(s0//2), 3]",
    "f32[s0 - 1]", "i64[Mod(s0, 3)]", "f32[2, 3]@cuda:0", "[f32[3], i64[u1]]", "(f32[u0, 16], f32[0], i64[2], i64[u0])",
    "[f32[2, 3]{1, 2}]", "s0*s1", "u0 + 3", "16", "-1", "0.5", "1e-07", "inf", "True", "float", "bool",
]  # fmt: skip


def names(fakes: Fakes, *values: object) -> SymbolNames:
    """Symbols numbered as in the texts."""
    graph = fx.Graph()
    first = [fakes.value(text) for text in ("f32[]", "s0", "s1", "u0", "u1")]
    for value in (*first, *values):
        graph.placeholder("x").meta["val"] = value
    return SymbolNames(graph.nodes)


@pytest.mark.parametrize("text", TYPES)
def test_a_value_has_the_type_that_it_was_made_of(text: str) -> None:
    fakes = Fakes("cpu")
    symbols = names(fakes)
    value = fakes.value(text)
    assert symbols.type(value, exact=True) == text
    assert fakes.value(text) is value


def test_strides_show_only_where_they_count() -> None:
    with Fakes("cpu").mode as mode:
        symbols = names(Fakes("cpu"))
        one = torch.empty_strided((4, 1, 3), (3, 77, 1))
        none = torch.empty_strided((0, 3), (5, 7))
        assert symbols.type(one, exact=True) == "f32[4, 1, 3]"
        assert symbols.type(none, exact=True) == "f32[0, 3]"
        assert symbols.type(torch.empty(4, 3).t(), exact=True) == "f32[3, 4]{1, 3}"
        assert symbols.type(torch.empty(4, 3).t()) == "f32[3, 4]"
    assert mode is not None


def test_a_long_list_says_too_little() -> None:
    assert Fakes("cpu").value("list[4]") is None


WRONG = ["f32", "f99[2]", "f32[x]", "f32[2](1)", "s0 if s0 else 1", "open('x')", "os", "f32[s0.y]"]


@pytest.mark.parametrize("text", WRONG)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no size|is no dtype"):
        Fakes("cpu").value(text)
