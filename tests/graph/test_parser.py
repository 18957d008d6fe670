"""The text of a graph is the graph: it parses to an equal one, which prints the same and passes the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import FileCheck

import ep_fx
from ep_fx.graph import (
    BufferSpec,
    Manifest,
    MeshSpec,
    ParallelGraph,
    ParseError,
    PassManager,
    Phase,
    bind_groups,
    graph_difference,
    graph_equal,
    parse_graph,
    print_graph,
)
from ep_fx.passes import default_pipeline
from ep_fx.testing import fake_mesh
from ep_fx.verify import verify
from tests.capturing import captured
from tests.hf.cases import everything
from tests.models.hand_moe import HandMoE, tokens_for
from tests.models.hf import tiny_hf
from tests.models.tiny_moe import TinyMoE, token_ids
from tests.verify.builder import Step
from tests.verify.test_valid import VARIANTS
from tests.viz import sample, synthetic

aten = torch.ops.aten


def round_trip(graph: ParallelGraph, types: bool = False) -> ParallelGraph:
    """The graph read from the text of `graph`, after checking that nothing was lost."""
    text = print_graph(graph)
    parsed = parse_graph(text)
    assert print_graph(parsed) == text
    assert graph_difference(graph, parsed) is None
    parsed.graph.lint()
    reports = [verify(g, types=types) for g in (graph, parsed)]
    assert reports[1].broken == reports[0].broken
    assert [r.checked for r in reports[1].results] == [r.checked for r in reports[0].results]
    return parsed


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(fsdp=3, ep=2) as found:
        yield found


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_steps_by_hand(options: dict[str, Any]) -> None:
    round_trip(Step(**options).graph)


@pytest.mark.parametrize("build", [sample.build, sample.build_logical, lambda: synthetic.layers(3, 4)])
def test_graphs_with_values_of_symbolic_sizes(build: Callable[[], ParallelGraph]) -> None:
    round_trip(build())


def test_captured_graphs_before_and_after_every_pass(mesh: DeviceMesh) -> None:
    """Uneven cuts on three by two ranks, views and transposes with their strides, symbolic and unbacked sizes."""
    _, graph = captured(TinyMoE(shared=True), mesh, token_ids(0))
    manager = PassManager(default_pipeline(), keep=True)
    manager.run(graph)
    for record in manager.records:
        assert record.before is not None
        round_trip(record.before)
    parsed = round_trip(graph, types=True)
    assert parsed.manifest.computation == graph.manifest.computation


def test_a_graph_of_transformers_whose_sizes_are_tied(mesh: DeviceMesh) -> None:
    """Ids, mask and labels have symbols of their own; that they agree shows in the sizes of the trace."""
    inputs = everything(0, 2, 8)
    module = ep_fx.transform(tiny_hf("mixtral", num_hidden_layers=1), mesh, example_kwargs=inputs)
    parsed = round_trip(module.graph, types=True)
    FileCheck().check_regex(r"^sizes s0=(\d+), s1=(\d+), ").run(print_graph(parsed).split("\n")[1])


def test_a_forward_only_graph(mesh: DeviceMesh) -> None:
    module = ep_fx.transform(HandMoE(), mesh["ep"])
    with torch.no_grad():
        module.prepare(tokens_for([0, 1, 2, 3]))
    parsed = round_trip(module.graph)
    assert "backward:" not in print_graph(parsed)


def test_passes_run_on_a_graph_from_text_as_on_the_original(mesh: DeviceMesh) -> None:
    _, graph = captured(HandMoE(), mesh, tokens_for([0, 1, 2, 3]))
    parsed = parse_graph(print_graph(graph), mesh=graph.manifest.mesh)
    for each in (graph, parsed):
        PassManager(default_pipeline(), lambda g: verify(g).raise_if_broken()).run(each)
    assert print_graph(parsed) == print_graph(graph)


# -- facts ---------------------------------------------------------------------------------------------------------
FACTS: dict[str, Callable[[Manifest], Any]] = {
    "mesh": lambda m: replace(m.mesh, sizes={**m.mesh.sizes, "replicate": 2}),
    "parameters": lambda m: (replace(m.parameters[0], dtype=torch.float8_e4m3fn), *m.parameters[1:]),
    "buffers": lambda m: tuple(replace(b, mutated=not b.mutated) for b in m.buffers),
    "inputs": lambda m: m.inputs[::-1],
    "tangents": lambda m: m.tangents[::-1],
    "num_outputs": lambda m: m.num_outputs + 1,
    "differentiable": lambda m: (5,),
    "input_grads": lambda m: m.inputs,
    "regions": lambda m: (replace(m.regions[0], has_backward=False), *m.regions),
    "zero_gradients": lambda m: (m.parameters[1].name,),
    "grad_reduce": lambda m: "sum",
    "reshard_after_forward": lambda m: False,
    "expert_reshard": lambda m: "early",
    "prefetch_depth": lambda m: 2,
    "computation": lambda m: {"output 0": -3, 'gradient of "x"': 2**62},
}
"""For each field of the Manifest another value; a new field belongs here, and in the text."""
ORDER_ONLY = frozenset({"inputs", "tangents"})
"""Fields that say in which order placeholders stand; with one of a kind there is no other order."""


@pytest.mark.parametrize("fact", [f.name for f in fields(Manifest) if f.init])
def test_every_fact_of_the_manifest_is_in_the_text_and_comes_back(fact: str) -> None:
    step = Step().graph
    changed = step.copy()
    changed.manifest = replace(step.manifest, **{fact: FACTS[fact](step.manifest)})
    parsed = parse_graph(print_graph(changed))
    assert graph_difference(changed, parsed) is None
    if fact not in ORDER_ONLY:
        assert print_graph(changed) != print_graph(step)
        difference = graph_difference(step, parsed)
        assert difference is not None
        assert difference.startswith(f"Manifest.{fact}")


def test_placeholders_keep_their_names_and_units_and_regions_may_have_any_name() -> None:
    graph = Step().graph
    odd = 'ünit "1", x; y'
    region = replace(graph.manifest.regions[0], name=odd, unit=odd, ep_size=1)
    graph.manifest = replace(
        graph.manifest,
        parameters=tuple(replace(p, unit=odd, name=f"{odd} {p.name}") for p in graph.manifest.parameters),
        regions=(replace(region, parameters=(f"{odd} block.experts.w1",)),),
        buffers=(BufferSpec(odd, "steps", True),),
    )
    graph.provides = ("fsdp", odd)
    parsed = parse_graph(print_graph(graph))
    assert graph_equal(graph, parsed)
    assert [p.placeholder for p in parsed.manifest.parameters] == [p.placeholder for p in graph.manifest.parameters]
    assert parsed.manifest.units.keys() == {odd}


# -- groups --------------------------------------------------------------------------------------------------------
def test_groups_are_those_of_the_mesh_that_is_given() -> None:
    graph = Step(fsdp=2, ep=2, replicate=2).graph
    text = print_graph(graph)
    assert '"tokens"' in text
    parsed = parse_graph(text)
    assert parsed.manifest.mesh.groups["fsdp", "ep"] == "fsdp,ep"
    names = {dims: str(40 + i) for i, dims in enumerate(graph.manifest.mesh.groups)}
    bound = parse_graph(text, mesh=replace(graph.manifest.mesh, groups=names, exchange="99"))
    groups = {a for node in bound for a in node.args if isinstance(a, str)}
    assert groups & {"99", *names.values()} == {"99", names["fsdp", "ep"], names["fsdp",], names["replicate",]}
    assert verify(bound).ok
    assert print_graph(bound) == text


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    graph = Step().graph
    with pytest.raises(ValueError, match=r"a mesh of .*'ep': 2.*, got one of \{'ep': 4\}"):
        bind_groups(graph, MeshSpec({"ep": 4}, {}))
    with pytest.raises(ValueError, match=r"needs the groups .*'fsdp,ep'"):
        bind_groups(graph, replace(graph.manifest.mesh, groups={}))


def test_a_group_of_no_mesh_keeps_its_name() -> None:
    step = Step()
    node = next(n for n in step.fx.nodes if n.name == "unshard_first_forward")
    node.args = (*node.args[:2], "41")
    text = print_graph(step.graph)
    assert '4, "group 41")' in text
    assert next(n for n in parse_graph(text) if n.name == "unshard").args[2] == "41"


# -- constants -----------------------------------------------------------------------------------------------------
def with_constants(**constants: torch.Tensor) -> ParallelGraph:
    graph = fx.Graph()
    total = graph.placeholder("x")
    for name in constants:
        total = graph.call_function(aten.add.Tensor, (total, graph.create_node("get_attr", name)))
    graph.output(((total,), (), ()))
    return ParallelGraph(graph, Manifest(MeshSpec({}, {}), (), (), ("x",), (), 1, ()), constants)


def test_small_constants_are_written_out() -> None:
    special = torch.tensor([0.1, float("nan"), float("-inf")])
    graph = with_constants(a=special, b=torch.tensor([[True], [False]]), c=torch.tensor(3), d=torch.empty(2, 0))
    text = print_graph(graph)
    assert '%constant: f32[3] = constant("a", [0.10000000149011612, nan, -inf])' in text
    parsed = round_trip(graph)
    assert torch.equal(parsed.constants["a"].view(torch.int32), special.view(torch.int32))
    assert parsed.constants["b"].dtype is torch.bool
    assert parsed.constants["d"].shape == (2, 0)


def test_large_constants_are_named_by_their_bytes() -> None:
    table = torch.arange(100.0)
    graph = with_constants(table=table)
    text = print_graph(graph)
    assert 'constant("table", "sha256:' in text
    assert torch.equal(parse_graph(text, constants={"table": table}).constants["table"], table)
    with pytest.raises(ParseError, match=r"line \d+: .*\n  constant 'table' has other bytes: expected sha256:"):
        parse_graph(text, constants={"table": table + 1})
    without = parse_graph(text)
    assert without.constants["table"].device.type == "meta"
    assert verify(without).ok
    assert graph_equal(graph, without)


# -- errors --------------------------------------------------------------------------------------------------------
WRONG: dict[str, tuple[str, str, str]] = {
    "operator": ("aten.relu(%grouped_mm)", "aten.rely(%grouped_mm)", "no operator 'aten.rely'"),
    "function": ("aten.relu(%grouped_mm)", "builtins.eval(%grouped_mm)", "no operator 'builtins.eval'"),
    "attribute": ("aten.relu(%grouped_mm)", "setitem(%grouped_mm, 0, 1)", "no operator 'setitem'"),
    "unknown value": ("aten.relu(%grouped_mm)", "aten.relu(%grouped)", "no value %grouped above this line"),
    "value twice": ("%relu =", "%grouped_mm =", "there is a value %grouped_mm already"),
    "object": ("aten.relu(%grouped_mm)", "aten.relu(<object>)", "expected an argument at '<object>"),
    "word": ("aten.relu(%grouped_mm)", "aten.relu(up)", "'up' is no dtype, no device"),
    "parenthesis": ("aten.relu(%grouped_mm)", "aten.relu(%grouped_mm", "expected ','"),
    "rest": ("aten.relu(%grouped_mm)", "aten.relu(%grouped_mm) + 1", "expected the end of the line, or a comment, at"),
    "left": ("%relu =", "%relu: =", "expected '%name: type = operator"),
    "type": ("%relu =", "%relu: f32(3) =", "is no size and no type"),
    "group": ('4, "fsdp,ep")', '4, "fsdp,tp")', "no group 'fsdp,tp'; its groups: fsdp, fsdp,ep, ep, tokens"),
    "policy": ("grad_reduce=mean", "grad_reduce=max", "expected mean, sum, got 'max'"),
    "policy name": ("grad_reduce=mean", "grad_scale=mean", "no policy 'grad_scale'"),
    "layout": ("dim 0 cut 4 x 2", "dim 0 cut 4 by 2", "expected 'DTYPE\\[shape\\], dim"),
    "region": ("region block.experts: 4 experts", "region block.experts: experts", "expected 'region NAME"),
    "region of no rank": ("4 experts, unit", "4 experts over 0 ranks, unit", "no experts lie over 0 ranks"),
    "dimension": ("f32[8, 8], dim 0", "f32[8, 8], dim 99999999999999999999", r"\[8, 8\] has no dimension 99999999"),
    "heading": ("mesh ", "mush ", "expected graph, sizes, mesh, groups"),
    "cut": ("  %relu = ", "# %relu = ", "no value %relu above"),
    "one line less": ("  ep_fx.reshard([%p0.full])", "# ", "the text says it has .* nodes, but shows"),
    "no return": ("  return [%mm_1]", "  # ", "it is not a whole graph"),
    "no mesh": ("mesh replicate 1", "# ", "line 3: .*\n  expected a line 'mesh"),
    "one dimension twice": ("fsdp 2 x ep 2, 4 data", "ep 2 x ep 2, 4 data", "expected each of replicate, fsdp"),
    "no rank": ("fsdp 2 x ep 2, 4 data", "fsdp 0 x ep 2, 0 data", "at least one rank"),
    "data ranks": ("4 data ranks", "8 data ranks", "these sizes make 4 data ranks, the text says 8"),
    "groups": ("fsdp 2 x ep 2, 4 data", "fsdp 4 x ep 1, 4 data", "no dimensions 'fsdp,ep' of several ranks"),
    "cut over no group": ('"fsdp", "fsdp,ep",', '"fsdp",', "no group 'fsdp,ep' to gather over"),
    "no gradient": ("  return gradient of %p3", "  # ", "returns 3 gradients of parameters, 4 are due"),
    "gradients swapped": ("gradient of %p0: ", "gradient of %p1: ", "expected the gradient of first.weight here"),
    "negative size": ("%relu =", "%relu: f32[16, -1] =", "line .*\n  no value of a graph: .* negative dimension"),
    "huge size": ("%relu =", "%relu: f32[u0, 99999999999999999999] =", "line .*\n  no value of a graph: TypeError"),
    "huge power": ("%relu =", "%relu: f32[2**99999999999] =", "is no exponent of a size"),
    "huge cut": ("dim 0 cut 4 x 2", "dim 0 cut 99999999999 x 2", "no mesh has 99999999999 ranks"),
    "huge run": ("parameters %p1, %p2", "parameters %p1..%p99999999999", "no graph has the parameters"),
    "division by zero": ("%relu =", "%relu: f32[s0//0] =", "line .*\n  "),
    "argument missing": ("aten.mm(%x, %t)", "aten.mm(%x)", "aten.mm takes \\(self, mat2\\), got \\(...\\)"),
    "argument too many": ("aten.relu(%grouped_mm)", "aten.relu(%grouped_mm, %x)", "aten.relu takes \\(self\\), got"),
    "list for a tensor": ("aten.relu(%grouped_mm)", "aten.relu([1])", "expected Tensor as self of aten.relu, got list"),
    "argument of a function": ('%sym_size, 2, "block.experts")', "%sym_size)", "missing a required argument"),
    "two returns": ("  return [%mm_1]", "  return [%mm_1]\n  return [%mm_1]", "expected one 'return"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_shows_the_line_and_what_was_expected(name: str) -> None:
    old, new, message = WRONG[name]
    text = print_graph(Step().graph)
    assert old in text
    with pytest.raises(ParseError, match=message) as raised:
        parse_graph(text.replace(old, new, 1))
    assert str(raised.value).startswith("line ") or "the text" in str(raised.value)


def test_a_tensor_where_splits_stand_is_told_by_a_rule_and_can_be_shown() -> None:
    text = print_graph(Step().graph)
    old = "(%send_rows, %context.output_splits,"
    assert old in text
    graph = parse_graph(text.replace(old, "(%send_rows, %t,"))
    report = verify(graph)
    assert "pair" in report.broken
    assert "got       %t" in report.explain()
    assert "(%send_rows, %t," in print_graph(graph)


def test_half_a_graph_is_refused() -> None:
    graph = Step().graph
    for phase in Phase:
        with pytest.raises(ParseError, match=r"nodes, but shows|not a whole graph|no value"):
            parse_graph(print_graph(graph, phase=phase))
