"""``ep-fx transform``: capture a model, run the passes, verify after each, print the graph."""

from __future__ import annotations

import sys
from pathlib import Path

from ep_fx.cli import options as opt
from ep_fx.cli.failure import Code, FailedError
from ep_fx.cli.output import Stages, print_json, print_text
from ep_fx.cli.view import check_suffix, write
from ep_fx.explain.table import plain
from ep_fx.graph import format_records
from ep_fx.graph.printer import print_graph
from ep_fx.verify import verify


def transform(
    subject: opt.SubjectArgument,
    mesh: opt.MeshOption = None,
    world: opt.WorldOption = None,
    output: opt.OutputOption = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    dynamic: opt.DynamicOption = False,
    pipeline: opt.PipelineOption = None,
    target: opt.TargetOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Capture a model, run the passes, verify after each; print the graph, or write it with -o."""
    if target is not None and Path(subject).is_file():
        raise FailedError(Code.INPUT, f"{subject} is a printed graph, which was captured: leave --target out")
    if output is not None:
        check_suffix(output)
    with Stages() as stages:
        options = opt.Options(mesh, world, batch, seq, dynamic, pipeline, target)
        built = opt.build(subject, options, stages, verified=True)
        with stages.stage("verify"):
            report = verify(built.graph).raise_if_broken()
        if output is not None:
            with stages.stage(f"write {output}"):
                write(built, output)
    if json:
        records = [
            {"pass": r.name, "seconds": r.seconds, "added": r.added, "removed": r.removed, "moved": r.moved}
            for r in built.records
        ]
        written = None if output is None else str(output)
        facts = {"nodes": len(built.graph.graph.nodes), "passes": records, "seconds": plain(built.seconds)}
        print_json({"ok": report.ok, **facts, "output": written})
    elif output is None:
        print_text(print_graph(built.graph))
    else:
        print(f"{format_records(built.records)}\n{report}\n\nwritten: {output}", file=sys.stderr)
    return 0
