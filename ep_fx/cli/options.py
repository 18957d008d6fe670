"""The arguments that commands share, and the graph that they name: a printed one, or that of a model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ep_fx.api import transform
from ep_fx.cli.failure import Code, FailedError
from ep_fx.cli.mesh import fake_mesh, parse_mesh
from ep_fx.cli.models import load
from ep_fx.cli.output import Stages
from ep_fx.graph import History, ParallelGraph, ParseError, PassError, PassRecord, parse_graph
from ep_fx.verify import VerificationError

SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help="a model, as module:callable or as a folder with a HuggingFace config.json; or a printed graph (a file)",
    ),
]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", metavar="SIZES", help="sizes of the mesh of a model, such as fsdp=64,ep=16")
]
WorldOption = Annotated[
    int | None, typer.Option("--world", metavar="N", help="number of ranks, to be sure that the mesh amounts to it")
]
DEFAULT_BATCH, DEFAULT_SEQ = 1, 4096
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", metavar="N", min=1, help=f"sequences of a micro-batch on a rank; default {DEFAULT_BATCH}"),
]
SeqOption = Annotated[
    int | None, typer.Option("--seq", metavar="N", min=1, help=f"tokens of a sequence; default {DEFAULT_SEQ}")
]
DynamicOption = Annotated[
    bool, typer.Option("--dynamic", help="leave batch and sequence sizes free, as ep_fx.transform does (slower)")
]
PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", metavar="PASSES", help="the passes, as text; without it the default ones")
]
TargetOption = Annotated[
    Literal["npu"] | None, typer.Option("--target", help="device to capture for, and what would run each node there")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="write to this file; its suffix says what")
]


@dataclass(frozen=True)
class Options:
    """How a model is captured; see the options of the same names."""

    mesh: str | None
    world: int | None
    batch: int | None = None
    seq: int | None = None
    dynamic: bool = False
    pipeline: str | None = None
    target: Literal["npu"] | None = None

    @property
    def of_models(self) -> tuple[str, ...]:
        """The options that are given and say something about a model only."""
        given = {
            "--mesh": self.mesh, "--batch": self.batch, "--seq": self.seq, "--dynamic": self.dynamic or None,
            "--pipeline": self.pipeline,
        }  # fmt: skip
        return tuple(name for name, value in given.items() if value is not None)


@dataclass(frozen=True)
class Built:
    """A graph and how it came about.

    Args:
        graph: the graph.
        records, history: what each pass did, and the order of the nodes after each; none for a printed graph.
        seconds: CPU seconds of each stage.
    """

    graph: ParallelGraph
    records: tuple[PassRecord, ...]
    seconds: dict[str, float]
    history: History | None = None


def build(subject: str, options: Options, stages: Stages, *, verified: bool = False) -> Built:
    """The graph that `subject` names.

    Args:
        verified: run the rules after every pass.

    Raises:
        FailedError: it names nothing, or the model cannot be captured.
    """
    started = time.process_time()
    if Path(subject).is_file():
        if options.of_models:
            said = f"{subject} is a printed graph, which has its mesh, sizes and passes"
            raise FailedError(Code.INPUT, f"{said}: leave {', '.join(options.of_models)} out")
        with stages.stage(f"read {subject}"):
            graph = _read(Path(subject))
        ranks = math.prod(graph.manifest.mesh.sizes.values())
        if options.world not in (None, ranks):
            raise FailedError(Code.INPUT, f"{subject} is a graph for {ranks} ranks, --world says {options.world}")
        return Built(graph, (), {"read": time.process_time() - started})
    if options.mesh is None:
        raise FailedError(Code.INPUT, f"{subject!r} is no file; a model needs --mesh, such as --mesh fsdp=2,ep=2")
    return _capture(subject, options, parse_mesh(options.mesh, options.world), stages, verified)


def _read(path: Path) -> ParallelGraph:
    try:
        return parse_graph(path.read_text(encoding="utf-8"))
    except (OSError, ParseError, UnicodeDecodeError) as error:
        raise FailedError(Code.INPUT, f"{path}: {error}") from error


def _capture(subject: str, options: Options, sizes: dict[str, int], stages: Stages, verified: bool) -> Built:
    clock, seconds = time.process_time, dict[str, float]()
    with fake_mesh(sizes) as mesh:
        start = clock()
        with stages.stage(f"load {subject}"):
            loaded = load(subject, options.batch or DEFAULT_BATCH, options.seq or DEFAULT_SEQ)
        seconds["load"], start = clock() - start, clock()
        try:
            module = transform(
                loaded.model, mesh, pipeline=options.pipeline, dynamic=options.dynamic, verify=verified,
                target=options.target,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise FailedError(Code.INPUT, f"{subject}: {error}") from error
        seconds["lay out"], start = clock() - start, clock()
        with stages.forward_of(loaded.model):
            try:
                module.prepare(*loaded.args, **loaded.kwargs)
            except (PassError, VerificationError):
                raise
            except (Exception, SystemExit) as error:
                raise FailedError(Code.CAPTURE, f"{subject}: {type(error).__name__}: {error}") from error
        program = module.programs[-1]
        records = program.records
        passes, checks = sum(r.seconds for r in records), sum(r.check_seconds for r in records)
        seconds |= {"capture": clock() - start - passes - checks, "passes": passes}
        if verified:
            seconds["rules after each pass"] = checks
        return Built(program.graph, records, seconds, program.history)
