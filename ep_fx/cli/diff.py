"""``ep-fx diff``: where two graphs differ first, and which operators one has more of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ep_fx.cli import options as opt
from ep_fx.cli.failure import Code, FailedError
from ep_fx.cli.output import Stages, print_json, print_table, print_text
from ep_fx.explain import Table
from ep_fx.graph import ParallelGraph, graph_difference, target_name


def diff(
    first: opt.SubjectArgument,
    second: opt.SubjectArgument,
    mesh: opt.MeshOption = None,
    world: opt.WorldOption = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    dynamic: opt.DynamicOption = False,
    pipeline: opt.PipelineOption = None,
    second_pipeline: Annotated[
        str | None, typer.Option("--second-pipeline", metavar="PASSES", help="other passes for the second model")
    ] = None,
    json: opt.JsonOption = False,
) -> int:
    """Compare two graphs; exit 1 where they differ. Names and source lines do not count."""
    printed = [Path(subject).is_file() for subject in (first, second)]
    if second_pipeline is not None and printed[1]:
        raise FailedError(Code.INPUT, f"{second} is a printed graph, which has its passes: leave --second-pipeline out")
    options = opt.Options(mesh, world, batch, seq, dynamic, pipeline)
    other = opt.Options(mesh, world, batch, seq, dynamic, second_pipeline or pipeline)
    if printed[0] != printed[1]:  # what is said of models is said of the one that is one
        options, other = (opt.Options(None, world) if p else o for p, o in zip(printed, (options, other), strict=True))
    with Stages() as stages:
        graphs = tuple(opt.build(subject, how, stages).graph for subject, how in ((first, options), (second, other)))
        with stages.stage("compare"):
            difference = graph_difference(*graphs)
            counts = _counts(*graphs)
    if json:
        print_json({"equal": difference is None, "first_difference": difference, "operators": counts})
    elif difference is None:
        print_text("the graphs are equal")
    else:
        print_text(f"they differ first at {difference}\n")
        if counts:
            rows = tuple((name, str(a), str(b), f"{b - a:+}") for name, (a, b) in counts.items())
            print_table(Table("operators", ("operator", "first", "second", "more"), rows))
    return int(Code.OK if difference is None else Code.BROKEN)


def _counts(a: ParallelGraph, b: ParallelGraph) -> dict[str, tuple[int, int]]:
    """How often each graph has an operator, where they differ in that."""
    left, right = (Counter(target_name(node) for node in graph) for graph in (a, b))
    return {name: (left[name], right[name]) for name in sorted({*left, *right}) if left[name] != right[name]}
