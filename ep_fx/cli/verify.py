"""``ep-fx verify``: the rule table on a model's graph or on a printed one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ep_fx.cli import options as opt
from ep_fx.cli.failure import Code, FailedError
from ep_fx.cli.output import Stages, print_json, print_text
from ep_fx.graph import info_of
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
    batch: opt.BatchOption = opt.DEFAULT_BATCH,
    seq: opt.SeqOption = opt.DEFAULT_SEQ,
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
    if json:
        print_json(_facts(report))
    else:
        print_text(str(report))
        if not built.graph.manifest.computation and (not rule or "computes" in rule):
            print_text("computes compared nothing: the graph has no record of what capture found (section `computes`)")
        if not report.ok:
            print_text(report.explain())
    return int(Code.OK if report.ok else Code.BROKEN)


def _facts(report: Report) -> dict[str, Any]:
    return {"ok": report.ok, "seconds": report.seconds, "rules": [_result(result) for result in report.results]}


def _result(result: RuleResult) -> dict[str, Any]:
    violations = []
    for found in result.violations:
        info = info_of(found.at)
        where = {"node": found.at.name, "module": info.fqn, "source": info.source}
        violations.append({**where, "expected": found.expected, "got": found.got, "remedy": found.remedy})
    return {
        "rule": result.rule.id,
        "sentence": result.rule.sentence,
        "ok": not violations,
        "checked": result.checked,
        "violations": violations,
    }
