"""Golden files of graphs: they hold what they are about, and patterns say where they fail."""
from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

from ep_fx.graph import ParallelGraph, Role, print_graph
from ep_fx.testing import Golden, golden_text
from ep_fx.testing.patterns import check_patterns
from ep_fx.testing.synthetic import logical_step, parallel_step

SELECTED = "dispatch[layer=layers.1] | unshard[unit=layers.1.experts]"
TEXT = "a = load(x)\nb = add(a, a)\nc = add(b, a)\nreturn c\n"


@pytest.fixture
def graph() -> ParallelGraph:
    return parallel_step(2)


def busier(graph: ParallelGraph) -> fx.Node:
    """One more product in front: what is numbered over the whole graph has other numbers."""
    product = next(node for node in graph if "aten.mm" in str(node.target))
    with graph.graph.inserting_before(product):
        return graph.call(product.target, *product.args, like=product, value=product.meta["val"])


def test_a_restricted_file_changes_with_what_it_is_about_only(graph: ParallelGraph, tmp_path: Path) -> None:
    Golden(tmp_path, update=True)(graph, "dispatch", SELECTED)
    before = golden_text(graph)
    busier(graph)
    Golden(tmp_path)(graph, "dispatch", SELECTED)
    assert golden_text(graph) != before
    node = graph.nodes(Role.SEND_ROWS)[1]
    node.args = (node.args[0], graph.nodes(Role.SEND_ROWS)[0].args[1])
    with pytest.raises(AssertionError) as error:
        Golden(tmp_path)(graph, "dispatch", SELECTED)
    assert "the graph differs from dispatch.txt; if that is wished: pytest --update-golden" in str(error.value)
    assert "-  %send_rows: f32[2*s0, 64] = ep_fx.send_rows(%_, %context.input_splits)  # layers.1" in str(error.value)
    assert "+  %all_to_all_single_1: f32[u0, 64] = c10d.all_to_all_single(%_, %context.output" in str(error.value)


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no golden file .*layer\.txt; make it with pytest --update-golden"):
        Golden(tmp_path)(logical_step(1), "layer")


def test_no_file_holds_source_lines(graph: ParallelGraph) -> None:
    assert "synthetic.py" in (graph_text := print_graph(graph))
    assert "synthetic.py" not in golden_text(graph)
    assert "computes:" in graph_text
    assert "computes:" not in golden_text(graph)


def test_files_of_patterns_are_never_rewritten(graph: ParallelGraph, tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    path.write_text("CHECK: no_such_operator\n")
    with pytest.raises(AssertionError, match=r"order\.txt:1: CHECK: no_such_operator"):
        Golden(tmp_path, update=True)(graph, "order")
    assert path.read_text() == "CHECK: no_such_operator\n"


@pytest.mark.parametrize(
    "patterns",
    [
        "CHECK: load\nCHECK-NEXT: b = add\nCHECK: return",
        "# words\n\nCHECK-COUNT-2: add\nCHECK-NOT: load\n",
        "CHECK: [[v:\\w+]] = load\nCHECK: add([[v]], [[v]])\nCHECK-NEXT: add({{[b-d]}}, [[v]])",
        "CHECK:    a   =  load(x)",
        "CHECK-NOT: return\nCHECK: load",
    ],
)
def test_patterns_that_hold(patterns: str) -> None:
    check_patterns(TEXT, patterns)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("CHECK: add\nCHECK: load", "patterns:2: CHECK: load\n  is not in or after line 3 of the text:"),
        ("CHECK: load\nCHECK-NEXT: return", "patterns:2: CHECK-NEXT: return\n  is not in line 2 of the text:"),
        ("CHECK-COUNT-3: add", "patterns:1: CHECK: add\n  is not in or after line 4"),
        ("CHECK: load\nCHECK-NOT: add\nCHECK: return", "stands in line 2 of the text:\n  > b = add(a, a)"),
        ("CHECK: load\nCHECK-NOT: return", "stands in line 4"),
        ("CHECK: [[v:\\w+]] = load\nCHECK: add([[v]], b)", "add([[v]], b)\n  is not in or after line 2"),
        ("CHECK: b = add(a, b)", "  lines that come near:\n     2  b = add(a, a)"),
    ],
)
def test_patterns_that_fail_say_where(patterns: str, said: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_patterns(TEXT, patterns)
    assert said in str(error.value)


@pytest.mark.parametrize("patterns", ["CHECK: add\nadd", "CHECK: [[v]]"])
def test_what_is_no_pattern_is_refused(patterns: str) -> None:
    with pytest.raises(ValueError, match=r"expected CHECK|not named yet"):
        check_patterns(TEXT, patterns)
