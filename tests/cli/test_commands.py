"""Every command, on a model and on its printed graph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from ep_fx.graph import Role, parse_graph
from ep_fx.graph.printer import print_graph
from ep_fx.verify import verify
from tests.cli.conftest import MESH, Run

TINY = "tests.cli.models:tiny"
EXPERTS = "blocks.0.moe.experts"


def test_transform_writes_a_verified_graph_that_is_read_back(run: Run, printed: Path, tmp_path: Path) -> None:
    graph = parse_graph(printed.read_text())
    assert verify(graph).ok
    assert graph.provides == ("dead-code", "expert-parallel", "fsdp", "dead-code")
    assert graph.manifest.mesh.sizes == {"fsdp": 2, "ep": 2}
    ran = run("transform", TINY, *MESH, "--dynamic")
    assert ran.code == 0
    assert re.search(r"^sizes s0=\d+, s1=\d+ in the trace$", ran.out, re.M)
    assert "sizes" not in printed.read_text().splitlines()[1]
    assert not dist.is_initialized()


def test_a_model_and_its_printed_graph_are_explained_alike(run: Run, printed: Path) -> None:
    model, text = run("explain", TINY, *MESH, "--json"), run("explain", printed, "--json")
    assert (model.code, text.code) == (0, 0)
    assert [unit["name"] for unit in model.json["units"]] == ["root", "blocks.0", EXPERTS]
    for name in ("mesh", "nodes", "units", "peaks", "reductions"):
        assert model.json[name] == text.json[name]
    assert [(row["kind"], row["count"], row["ranks"]) for row in model.json["collectives"]] == [
        (row["kind"], row["count"], row["ranks"]) for row in text.json["collectives"]
    ]


def test_explain_prints_all_tables_or_the_answers_asked_for(run: Run, printed: Path) -> None:
    tables = run("explain", printed).out
    titles = ("units", "collectives", "host syncs", "kept for backward", "peak of gathered parameters", "gradients")
    for title in titles:
        assert f"\n{title}\n" in tables
    asked = ("--why", "unshard_2", "--waiters", "all_to_all_single_1", "--gradient", f"{EXPERTS}.w1")
    answers = run("explain", printed, *asked)
    assert f"%unshard_2 gathers unit {EXPERTS} in forward" in answers.out
    assert f"is the dispatch of {EXPERTS}" in answers.out
    assert "divisor   4, due 4" in answers.out
    assert "\nunits\n" not in answers.out
    found = run("explain", printed, *asked, "--json").json["answers"]
    assert [next(iter(answer.values())) for answer in found][2] == f"{EXPERTS}.w1"
    assert found[0]["reasons"][0]["rule"] == "live"


def test_explain_takes_sizes_and_refuses_those_that_are_none(run: Run, printed: Path) -> None:
    said = run("explain", str(printed), "--sizes", "s0=7")
    assert said.code == 2
    assert "no free size 's0'" in said.err
    said = run("explain", str(printed), "--sizes", "s0")
    assert said.code == 2
    assert "--sizes 's0': expected names and sizes" in said.err


def test_an_answer_that_names_a_broken_rule_says_so_and_exits_with_1(run: Run, printed: Path, tmp_path: Path) -> None:
    graph = parse_graph(printed.read_text())
    for node in graph.nodes(Role.SCALE_GRAD):
        node.args = (node.args[0], 2.0)
    path = tmp_path / "wrong.txt"
    path.write_text(print_graph(graph))
    asked = ("explain", path, "--gradient", f"{EXPERTS}.w1")
    ran = run(*asked)
    assert (ran.code, "rule divisor is BROKEN" in ran.out) == (1, True)
    assert "rule reduce-once: " in ran.out
    assert run(*asked, "--json").code == 1
    assert run("explain", path).code == 0


def test_verify_gives_every_rule(run: Run, printed: Path) -> None:
    model = run("verify", TINY, *MESH, "--types", "--json")
    assert (model.code, model.json["ok"]) == (0, True)
    assert {rule["rule"]: rule["ok"] for rule in model.json["rules"]}["types"]
    assert run("verify", printed, "--rule", "divisor", "--json").json["rules"][0]["rule"] == "divisor"


@pytest.mark.parametrize("suffix", [".md", ".dot", ".perfetto.json", ".json", ".graphml", ".svg", ".html", ".txt"])
def test_view_writes_what_the_suffix_says(run: Run, printed: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    ran = run("view", printed, "-o", path, "--json")
    assert ran.code == 0
    assert ran.json == {"output": str(path), "bytes": path.stat().st_size}


def test_view_shows_the_layer_asked_for(run: Run, printed: Path, tmp_path: Path) -> None:
    assert run("view", printed, "-o", tmp_path / "layer.md", "--layer", "blocks.0").code == 0
    assert (tmp_path / "layer.md").read_text().startswith("# blocks.0")
    ran = run("view", printed, "-o", tmp_path / "layer.md", "--layer", "blocks.7")
    assert (ran.code, "did you mean 'blocks.0'" in ran.err) == (2, True)


def test_diff_says_whether_and_where_two_graphs_differ(run: Run, printed: Path, tmp_path: Path) -> None:
    same = run("diff", printed, printed)
    assert (same.code, same.out) == (0, "the graphs are equal\n")
    other = tmp_path / "other.txt"
    text = printed.read_text()
    assert "aten.silu(" in text
    other.write_text(text.replace("aten.silu(", "aten.relu(", 1))
    ran = run("diff", printed, other)
    assert ran.code == 1
    assert "they differ first at node" in ran.out
    found = run("diff", printed, other, "--json").json
    assert not found["equal"]
    assert found["operators"] == {"aten::relu": [0, 1], "aten::silu": [1, 0]}


def test_diff_of_a_model_under_two_pipelines(run: Run) -> None:
    passes = "dead-code,expert-parallel,fsdp{reshard=early},dead-code"
    ran = run("diff", TINY, TINY, *MESH, "--second-pipeline", passes, "--json")
    assert ran.code == 1
    assert "expert_reshard" in ran.json["first_difference"] or "passes" in ran.json["first_difference"]


def test_bench_gives_the_cost_of_each_stage(run: Run, printed: Path) -> None:
    found = run("bench", TINY, *MESH, "--json")
    assert found.code == 0
    assert set(found.json["seconds"]) == {
        "load", "lay out", "capture", "passes", "verify once", "explain", "timeline"
    }
    assert found.json["peak_gathered_bytes"] > 0
    assert 0 < found.json["nominal_step"]["stalled_seconds"] < found.json["nominal_step"]["seconds"]
    assert "nominal step" in run("bench", printed).out


@pytest.mark.parametrize("name", ["tiny_keywords", "alone"])
def test_a_callable_may_give_keywords_or_the_model_alone(run: Run, name: str) -> None:
    ran = run("explain", f"tests.cli.models:{name}", "--mesh", "fsdp=4", "--batch", 2, "--seq", 6, "--json")
    assert ran.code == 0
    assert ran.json["mesh"] == {"fsdp": 4}


def test_explain_for_a_target_lists_what_would_run(run: Run, printed: Path) -> None:
    """On any machine, of a model and of a printed graph."""
    model, text = (run("explain", *subject, "--target", "npu", "--json") for subject in ((TINY, *MESH), (printed,)))
    assert (model.code, text.code) == (0, 0)
    kinds = {row["target"]: row["kind"] for row in model.json["lowering"]}
    assert kinds["npu.npu_moe_token_permute"] == "npu kernel"
    assert kinds["ep_fx.send_rows"] == "composition"
    assert [row["target"] for row in text.json["lowering"]] == [row["target"] for row in model.json["lowering"]]
    shown = run("explain", printed, "--target", "npu").out
    assert "lowering to npu" in shown
    assert "conditions of the run" in shown
    assert {c["limit"] for c in model.json["run_time_conditions"]} >= {16777215}
    assert "all of it runs on the device" in shown
    assert "lowering to npu" not in run("explain", printed).out


def test_a_graph_for_an_npu_is_captured_for_it_and_read_back(run: Run, printed: Path, tmp_path: Path) -> None:
    path = tmp_path / "npu.txt"
    model = ("tests.cli.models:attending", "--mesh", "fsdp=2")
    assert run("transform", *model, "--target", "npu", "-o", path, "--json").code == 0
    assert "ep_fx.attention(" in path.read_text()
    rows = run("explain", path, "--target", "npu", "--json").json["lowering"]
    assert not [row for row in rows if row["kind"] == "cpu fallback"]
    assert run("transform", *model, "-o", path, "--json").code == 0
    left = [row for row in run("explain", path, "--target", "npu", "--json").json["lowering"] if row["reason"]]
    assert {row["reason"] for row in left if row["kind"] == "cpu fallback"} == {
        "the graph was captured for the CPU; one that is captured for target npu keeps attention whole"
    }


def test_a_target_is_no_question(run: Run, printed: Path) -> None:
    said = run("explain", printed, "--target", "npu", "--gradient", "norm.weight")
    assert said.code == 2
    assert "--target is about the tables" in said.err


def test_options_of_a_model_go_to_the_one_that_is_a_model(run: Run, printed: Path) -> None:
    for subjects in ((printed, TINY), (TINY, printed)):
        assert run("diff", *subjects, *MESH, "--world", "4").code == 0
    assert run("diff", printed, TINY, *MESH, "--world", "8").code == 2
    assert "leave --mesh out" in run("diff", printed, printed, *MESH).err
    assert "leave --second-pipeline out" in run("diff", TINY, printed, *MESH, "--second-pipeline", "fsdp").err
