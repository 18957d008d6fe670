"""Time of a training step: ep_fx against eager FSDP2 + expert parallelism, paired and interleaved in one run.

    python -m benchmarks.step_time [--pairs 30] [--profile DIR]

4 gloo ranks, mesh (fsdp 2, ep 2), B 2 x S 128 a rank, forward + backward + SGD. Both models live in the same processes
and take turns, the first of a pair changing each time, so that whatever else the machine does meets both alike.
Wall: the slowest rank. CPU: seconds of all threads of a rank, mean over ranks; where ranks outnumber cores it says
more. Ratio: ep_fx / eager, per pair.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import ep_fx
from benchmarks.eager_baseline import eager_model
from benchmarks.models import mixtral, token_ids
from ep_fx.testing.ranks import run_ranks

RANKS, WARM_UP = 4, 3


class Sample(NamedTuple):
    """One step on one rank."""

    wall: float
    cpu: float
    loss: float


Step = Callable[[], float]


def _trainer(model: nn.Module, rank: int) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = token_ids(rank)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _timed(step: Step) -> Sample:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    return Sample(time.perf_counter() - wall, time.process_time() - cpu, loss)


def _mesh() -> DeviceMesh:
    """A mesh of its own for each model."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))


def measure(rank: int, pairs: int, folder: str | None) -> dict[str, list[Sample]]:
    """Steps of both models on one rank, in turns.

    Args:
        folder: where rank 0 writes profiles of three steps of each model; None: no profile.
    """
    steps = {
        "eager": _trainer(eager_model(_mesh()), rank),
        "ep_fx": _trainer(ep_fx.transform(mixtral(), _mesh()), rank),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    for index in range(WARM_UP + pairs):
        for name in list(steps) if index % 2 else list(steps)[::-1]:
            sample = _timed(steps[name])
            if index >= WARM_UP:
                samples[name].append(sample)
    if folder is not None:
        _profile(rank, steps, Path(folder))
    return samples


def _profile(rank: int, steps: dict[str, Step], folder: Path) -> None:
    for name, step in steps.items():
        with profile(activities=[ProfilerActivity.CPU]) as record:
            for _ in range(3):
                step()
        if rank == 0:
            table = record.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60)
            (folder / f"{name}.txt").write_text(table)


class Row(NamedTuple):
    """Spread of one quantity."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Row:
        """Minimum, median and maximum."""
        return cls(min(values), statistics.median(values), max(values))


def report(results: list[dict[str, list[Sample]]]) -> str:
    """The table, from the samples of all ranks."""
    ranks, pairs = len(results), len(results[0]["eager"])
    lines = [f"{'':24}{'min':>8}{'median':>8}{'max':>8}   ({pairs} pairs, {ranks} ranks)"]
    by_model: dict[str, dict[str, list[float]]] = {}
    for name in results[0]:
        each = [[result[name][i] for result in results] for i in range(pairs)]
        by_model[name] = {
            "wall": [max(s.wall for s in step) for step in each],
            "cpu": [sum(s.cpu for s in step) / ranks for step in each],
        }
        for quantity, values in by_model[name].items():
            lines.append(_line(f"{name} {quantity} s", Row.of(values)))
    for quantity in ("wall", "cpu"):
        both = zip(by_model["ep_fx"][quantity], by_model["eager"][quantity], strict=True)
        lines.append(_line(f"ratio {quantity}", Row.of([ours / theirs for ours, theirs in both])))
    gap = max(abs(a.loss - b.loss) for r in results for a, b in zip(r["ep_fx"], r["eager"], strict=True))
    first, last = (results[0]["ep_fx"][i].loss for i in (0, -1))
    lines.append(f"loss of rank 0: {first:.4f} ... {last:.4f}; largest difference between the two: {gap:.1e}")
    return "\n".join(lines)


def _line(name: str, row: Row) -> str:
    return f"{name:24}{row.low:8.3f}{row.median:8.3f}{row.high:8.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--profile", type=Path, metavar="DIR", help="also write a profile of each model there")
    options = parser.parse_args(arguments)
    folder = None
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
        folder = str(options.profile.resolve())
    print(report(run_ranks(measure, RANKS, options.pairs, folder, timeout=60 + 20 * options.pairs)))


if __name__ == "__main__":
    from benchmarks import step_time  # so that the ranks find the function under the module's own name

    step_time.main()
