"""``ep-fx verify``: the rule table on a model's graph or on a printed one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ep_fx.cli import options as opt
from ep_fx.cli.failure import Code, FailedError
from ep_fx.cli.output import Stages, print_json, print_text
from ep_fx.graph import ParallelGraph, info_of
from ep_fx.graph.names import value_names
from ep_fx.graph.places import Places
from ep_fx.verify import RULES, Report
from ep_fx.verify import verify as run_rules
from ep_fx.verify.report import RuleResult


def verify(
    subject: opt.SubjectArgument,
    mesh: opt.MeshOption = None,
    world: opt.WorldOption = None,
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", metavar="ID", help=f"only this rule (may be repeated): {', '.join(RULES)}"),
    ] = None,
    types: Annotated[bool, typer.Option("--types", help="also propagate all types anew (slow)")] = False,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    dynamic: opt.DynamicOption = False,
    pipeline: opt.PipelineOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Run the rule table; exit 1 where a rule is broken, with the nodes around each culprit."""
    unknown = [name for name in rule or () if name not in RULES]
    if unknown:
        raise FailedError(Code.INPUT, f"no rule {', '.join(map(repr, unknown))}; rules are {', '.join(RULES)}")
    with Stages() as stages:
        built = opt.build(subject, opt.Options(mesh, world, batch, seq, dynamic, pipeline), stages)
        with stages.stage("verify"):
            report = run_rules(built.graph, rule or None, types=types)
    written = _as_written(Path(subject), built.graph)
    if json:
        print_json(_facts(report, written))
    else:
        print_text(str(report))
        if not built.graph.manifest.computation and (not rule or "computes" in rule):
            print_text("computes compared nothing: the graph has no record of what capture found (section `computes`)")
        if not report.ok:
            print_text(written(report.explain()))
    return int(Code.OK if report.ok else Code.BROKEN)


def _as_written(path: Path, graph: ParallelGraph) -> Callable[[str], str]:
    """Turns the names of nodes in a text, ``%p9_grad``, into those of the file that the graph was read from."""
    if not path.is_file():
        return str
    found = set(re.findall(r"%([\w.]+)", path.read_text(encoding="utf-8")))
    names = {name.replace(".", "_"): name for name in found if name.replace(".", "_") not in found or "." not in name}
    names |= {node.name: name for node, name in value_names(graph, Places(graph)).items() if node.op == "placeholder"}
    return lambda text: re.sub(r"%(\w+)", lambda match: f"%{names.get(match[1], match[1])}", text)


def _facts(report: Report, written: Callable[[str], str]) -> dict[str, Any]:
    rules = [_result(result, written) for result in report.results]
    return {"ok": report.ok, "seconds": report.seconds, "rules": rules}


def _result(result: RuleResult, written: Callable[[str], str]) -> dict[str, Any]:
    violations = []
    for found in result.violations:
        info = info_of(found.at)
        where = {"node": written(f"%{found.at.name}")[1:], "module": info.fqn, "source": info.source}
        said = {"expected": found.expected, "got": found.got, "remedy": found.remedy}
        violations.append(where | {key: written(text) for key, text in said.items()})
    return {
        "rule": result.rule.id,
        "sentence": result.rule.sentence,
        "ok": not violations,
        "checked": result.checked,
        "violations": violations,
    }
