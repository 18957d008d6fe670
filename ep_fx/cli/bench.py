"""``ep-fx bench``: what capture, passes, rules and pictures cost for a model, and its step on a nominal machine."""

from __future__ import annotations

import resource
import time

import ep_fx
from ep_fx.cli import options as opt
from ep_fx.cli.output import Stages, print_json, print_table
from ep_fx.cost.timeline import timeline
from ep_fx.explain import Table
from ep_fx.graph.texts import plural
from ep_fx.graph.values import bytes_text
from ep_fx.verify import verify


def bench(
    subject: opt.SubjectArgument,
    mesh: opt.MeshOption = None,
    world: opt.WorldOption = None,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    dynamic: opt.DynamicOption = False,
    pipeline: opt.PipelineOption = None,
    json: opt.JsonOption = False,
) -> int:
    """CPU seconds of each stage, memory of this process, peak of gathered bytes, and a nominal step time."""
    with Stages() as stages:
        built = opt.build(subject, opt.Options(mesh, world, batch, seq, dynamic, pipeline), stages)
        seconds, start = dict(built.seconds), time.process_time()
        with stages.stage("verify"):
            report = verify(built.graph)
        seconds["verify once"], start = time.process_time() - start, time.process_time()
        with stages.stage("explain"):
            found = ep_fx.explain(built.graph)
            text = str(found)
        seconds["explain"], start = time.process_time() - start, time.process_time()
        with stages.stage("timeline"):
            line = timeline(built.graph)
        seconds["timeline"] = time.process_time() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = max(row.bytes for row in found.peaks)
    if json:
        numbers = {"nodes": len(built.graph.graph.nodes), "seconds": seconds, "process_bytes": memory}
        step = {"seconds": line.seconds, "stalled_seconds": line.stalled}
        print_json({"ok": report.ok, **numbers, "peak_gathered_bytes": peak, "nominal_step": step})
        return 0
    rows = [(name, f"{value:.2f} s") for name, value in seconds.items()]
    rows += [
        ("memory of this process", bytes_text(memory)),
        ("peak of gathered parameters", bytes_text(peak)),
        ("nominal step", f"{line.seconds * 1e3:.1f} ms, {100 * line.stalled / (line.seconds or 1):.0f}% of it waiting"),
    ]
    note = f"{plural(len(built.graph.graph.nodes), 'node')}, {len(text.splitlines())} lines of explanation; CPU time"
    print_table(Table(found.headline, ("what", "cost"), tuple(rows), note))
    return 0
