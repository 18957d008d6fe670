"""``ep-fx view``: a picture of a step in the format that the file's suffix names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ep_fx.cli import options as opt
from ep_fx.cli.failure import Code, FailedError
from ep_fx.cli.output import Stages, print_json, print_text
from ep_fx.viz import SUFFIXES, suffix_of, visualize


def view(
    subject: opt.SubjectArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help=f"what is written follows from {', '.join(SUFFIXES)}")
    ],
    mesh: opt.MeshOption = None,
    world: opt.WorldOption = None,
    layer: Annotated[
        str | None, typer.Option("--layer", metavar="PATH", help="for .md: the block to show, such as model.layers.3")
    ] = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    dynamic: opt.DynamicOption = False,
    pipeline: opt.PipelineOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Write a picture: drawing, page, Graphviz, mermaid, Model Explorer, GraphML, Perfetto timeline, or text."""
    check_suffix(output)
    with Stages() as stages:
        built = opt.build(subject, opt.Options(mesh, world, batch, seq, dynamic, pipeline), stages)
        with stages.stage(f"write {output}"):
            write(built, output, layer)
    if json:
        print_json({"output": str(output), "bytes": output.stat().st_size})
    else:
        print_text(f"written: {output}")
    return 0


def check_suffix(path: Path) -> None:
    """Raises before any work is done where `path` has no suffix that can be written."""
    try:
        suffix_of(path)
    except ValueError as error:
        raise FailedError(Code.INPUT, str(error)) from error


def write(built: opt.Built, path: Path, layer: str | None = None) -> None:
    """Writes the graph to `path`, with what its passes did where the format shows that."""
    try:
        visualize(built.graph, path, layer=layer, records=built.records, history=built.history)
    except (ValueError, OSError) as error:
        raise FailedError(Code.INPUT, str(error)) from error
