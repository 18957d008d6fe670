"""``ep-fx explain``: the tables of a step, or the answers to questions about it."""

from __future__ import annotations

from typing import Annotated

import typer

import ep_fx
from ep_fx.cli import options as opt
from ep_fx.cli.failure import Code, FailedError
from ep_fx.cli.mesh import parse_sizes
from ep_fx.cli.output import Stages, print_json, print_table, print_text
from ep_fx.explain import GatherAnswer, GradientAnswer, UnknownNameError, WaitersAnswer


def explain(
    subject: opt.SubjectArgument,
    mesh: opt.MeshOption = None,
    world: opt.WorldOption = None,
    why: Annotated[
        list[str] | None, typer.Option("--why", metavar="NODE", help="why is this gather here (may be repeated)")
    ] = None,
    waiters: Annotated[
        list[str] | None,
        typer.Option("--waiters", metavar="NODE", help="who waits for this exchange (may be repeated)"),
    ] = None,
    gradient: Annotated[
        list[str] | None,
        typer.Option("--gradient", metavar="NAME", help="sums and divisor of its gradient (may be repeated)"),
    ] = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    dynamic: opt.DynamicOption = False,
    pipeline: opt.PipelineOption = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", metavar="SIZES", help="sizes of the inputs for which bytes are, such as s0=8,s1=4096"),
    ] = None,
    target: opt.TargetOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Units, collectives, bytes, host syncs, kept values and peak of a step; or answers about one node.

    Exit 1 where an answer names a rule that the graph breaks, or where the target has no kernel for something inside
    of an MoE region.
    """
    if target is not None and (why or waiters or gradient):
        raise FailedError(Code.INPUT, "--target is about the tables; --why, --waiters and --gradient ask the graph")
    answers: list[GatherAnswer | WaitersAnswer | GradientAnswer] = []
    with Stages() as stages:
        built = opt.build(subject, opt.Options(mesh, world, batch, seq, dynamic, pipeline, target), stages)
        with stages.stage("explain"):
            try:
                found = ep_fx.explain(built.graph, sizes=parse_sizes(sizes))
            except ValueError as error:
                raise FailedError(Code.INPUT, f"--sizes {sizes}: {error}") from error
            try:
                answers += [found.why(name) for name in why or ()]
                answers += [found.waiters(name) for name in waiters or ()]
                answers += [found.gradient(name) for name in gradient or ()]
            except UnknownNameError as error:
                raise FailedError(Code.INPUT, str(error)) from error
            lowered = None if target is None else found.lowering()
            tables = () if answers or json else (*found.tables(), *(lowered.tables() if lowered else ()))
            facts = found.to_dict() if json and not answers else None
            if facts is not None and lowered is not None:
                facts["lowering"] = lowered.to_json()
                facts["run_time_conditions"] = lowered.conditions_to_json()
    left = lowered is not None and not lowered.is_covered
    if json:
        print_json(facts or {"answers": [answer.to_json() for answer in answers]})
    elif answers:
        print_text("\n".join(map(str, answers)))
    if json or answers:
        broken = any(reason.broken for answer in answers for reason in answer.reasons) or left
        return int(Code.BROKEN if broken else Code.OK)
    print_text(f"{found.headline}\n")
    for table in tables:
        print_table(table)
    return int(Code.BROKEN if left else Code.OK)
