"""Regenerates the parts of docs/ that come from graphs: ``make docs``.

Text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is replaced. One process with a fake process group is
enough: nothing runs, graphs are only captured, rewritten and read. ``--check`` only compares and fails on a difference.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import typer.main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ep_fx
from ep_fx.cli import app
from ep_fx.cli.failure import MEANING
from ep_fx.graph import MeshSpec, ParallelGraph, Phase, Role, find_regions, info_of, role_of
from ep_fx.targets.npu.preconditions import OPS
from ep_fx.targets.npu.table import TABLE, optional
from ep_fx.testing import assert_before, fake_world
from ep_fx.testing.graph_index import ROLES
from ep_fx.testing.mutate.base import operators
from ep_fx.testing.select import dispatch, unshard
from ep_fx.verify import RULES, verify
from ep_fx.verify.reasons import WHY
from ep_fx.verify.reduction_table import format_reductions, reduction_table
from ep_fx.verify.report import describe

DOCS = Path(__file__).parent
_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


class _Block(nn.Module):
    """A router, experts and a norm: the smallest model with every kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = ep_fx.nn.GroupedExperts(dim=16, hidden=32, num_experts=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights, ids = self.router(h).softmax(-1).topk(2)
        order = ids.flatten().argsort(stable=True)
        counts = (ids.flatten() == torch.arange(4, device=x.device).unsqueeze(1)).sum(1)
        rows = self.experts(h[order // 2], counts)
        y = torch.zeros_like(rows).index_copy(0, order, rows).view(*ids.shape, -1)
        return x + (y * weights.unsqueeze(-1)).sum(1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@functools.cache
def _module(policy: Literal["strict", "early"] = "strict", **sizes: int) -> ep_fx.EPModule:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return ep_fx.transform(_Model(), mesh, example_inputs=(torch.zeros(6, 16),), expert_reshard=policy)


def _reductions(**sizes: int) -> str:
    return format_reductions(reduction_table(_module(**sizes).graph))


def _order(policy: Literal["strict", "early"]) -> str:
    """The order of gathers and exchanges of one block, forward then backward, as the graph has it."""
    graph = _module(policy, fsdp=2, ep=2).graph
    parts = {node: region for region in find_regions(graph) for nodes in region.members.values() for node in nodes}
    words = {Role.UNSHARD: "unshard", Role.RESHARD: "reshard", Role.REDUCE_GRAD: "reduce_grad"}
    lines: list[str] = []
    for node in graph:
        phase = info_of(node).phase
        if role_of(node) in words:
            line = f"{words[role_of(node)]} {info_of(node).fqn}"
        elif node in parts and node is parts[node].first(phase):
            line = "dispatch" if phase is Phase.FORWARD else "combine_backward"
        elif node in parts and node is parts[node].last(phase):
            line = "combine" if phase is Phase.FORWARD else "dispatch_backward"
        elif role_of(node) is Role.GROUPED_MM or role_of(node) is Role.GROUPED_MM_BACKWARD:
            line = role_of(node).value.split("::")[1]
        else:
            continue
        lines.append(f"{phase.value:9}{line}")
    return "```\n" + "\n".join(lines) + "\n```\n"


def _rules() -> str:
    """Every rule: sentence, why, and the error of the first mutation operator that it notices."""
    examples = _examples(_module(fsdp=2, ep=2).graph)
    examples = {**_examples(_module(ep=2, tp=2).graph, families="partial_sums"), **examples}
    parts = []
    for rule in RULES.values():
        error = examples.get(rule.id)
        shown = f"What a user sees, here after *{error[0]}*:\n\n```\n{error[1]}\n```\n" if error else ""
        parts.append(f"### {rule.id}\n\n**{rule.sentence[0].upper()}{rule.sentence[1:]}.** {WHY[rule.id]}\n\n{shown}")
    return "\n".join(parts)


def _examples(graph: ParallelGraph, families: str = "") -> dict[str, tuple[str, str]]:
    """For each rule a mutation that it notices, preferably alone, and what it says then."""
    found: dict[str, tuple[int, str, str]] = {}
    for name, operator in sorted(operators(families=families).items()):
        mutant = operator(graph, random.Random(name))
        if mutant is None:
            continue
        report = verify(mutant, types=True)
        for rule in report.broken:
            if len(report.broken) < found.get(rule, (99, "", ""))[0]:
                violation = report.of(rule).violations[0]
                text = _portable(describe(RULES[rule], violation, list(mutant)), graph.manifest.mesh)
                found[rule] = (len(report.broken), operator.sentence, text)
    return {rule: (sentence, text) for rule, (_, sentence, text) in found.items()}


def _portable(text: str, mesh: MeshSpec) -> str:
    """Without what differs between machines and days: the file of this model, torch's numbers of symbols and groups."""
    for dims, name in (*mesh.groups.items(), *([(("exchange",), mesh.exchange)] if mesh.exchange else [])):
        text = text.replace(f"'{name}'", f"'{'_'.join(dims)}'")
    text = re.sub(r"'\d+'", "'another group'", text)
    return re.sub(r"\bs\d+\b", "s0", re.sub(r"/[^\s:]*/\w+\.py:\d+", "model.py:12", text))


def _commands() -> str:
    """Every command of ``ep-fx`` with its help and a table of its arguments and options."""
    group = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        rows = [_option(parameter) for parameter in command.params if parameter.name != "help"]
        table = "\n".join(["| argument or option | what |", "|---|---|", *rows])
        parts.append(f"### ep-fx {name}\n\n{command.help}\n\n{table}\n")
    return "\n".join(parts)


def _option(parameter: Any) -> str:
    """One line of the table: how it is written, what it does, its default."""
    takes = f" {parameter.metavar}" if parameter.metavar else ""
    written = parameter.metavar if parameter.param_type_name == "argument" else ", ".join(parameter.opts) + takes
    default = f"; default {parameter.default}" if isinstance(parameter.default, int) and parameter.default else ""
    needed = "; required" if parameter.required else ""
    return f"| `{written}` | {parameter.help}{default}{needed} |"


def _exit_codes() -> str:
    rows = [f"| {code.value} | {meaning} |" for code, meaning in MEANING.items()]
    return "\n".join(["| exit code | meaning |", "|---|---|", *rows]) + "\n"


def _example(kind: str, name: str) -> str:
    """An answer about the block of this file."""
    graph = _module(fsdp=2, ep=2).graph
    text = str(getattr(ep_fx.explain(graph), kind)(name))
    return "```\n" + re.sub(r"\w+\.py:\d+", "model.py:12", text) + "```\n"


def _words() -> str:
    """Every role that a selector can name, with its operator."""
    parts = []
    for word, role in ROLES.items():
        operator_name = role.value.split("::")[-1]
        if role is not Role.OTHER:
            parts.append(f"`{word}`" if word == operator_name else f"`{word}` (`{operator_name}`)")
    return f"{', '.join(parts)}.\n"


def _failure() -> str:
    """What an assertion says of a graph whose experts are gathered too late."""
    graph = _module(fsdp=2, ep=2).graph.copy()
    (gather, *_), (exchange, *_) = unshard("blocks.0.experts").find(graph), dispatch("blocks.0").find(graph)
    exchange.nodes[0].append(gather.nodes[0])
    try:
        assert_before(graph, unshard("blocks.0.experts"), dispatch("blocks.0"))
    except AssertionError as error:
        lines = [re.sub(r"(\w+)\.py:\d+", "model.py:12", line)[:150] for line in str(error).splitlines()]
        return "```\n" + "\n".join(lines) + "\n```\n"
    raise RuntimeError("the assertion did not notice")


def _models() -> str:
    """The matrix of architectures, from what `make models` recorded."""
    rows = json.loads((DOCS / "models.json").read_text())
    meshes = sorted({mesh for row in rows.values() for mesh in row["meshes"]}, reverse=True)
    head = ["architecture", "model", "experts", "flags", *(f"{mesh}: output, gradient" for mesh in meshes), "remarks"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, row in rows.items():
        errors = (row["meshes"].get(mesh) for mesh in meshes)
        cells = [f"{e['output']}, {e['gradient']}" if e else "" for e in errors]
        remark = f"refused: `{row['refused']}`" if row["refused"] else row["remark"]
        first = (name, f"`{row['model']}`", f"`{row['experts']}`", row["flags"])
        lines.append("| " + " | ".join([*first, *cells, remark]) + " |")
    return "\n".join(lines) + "\n"


def _npu_lowering() -> str:
    """The lowering table, and the lines that options add."""
    lines = ["| line | takes | emits | where it cannot | semantics from |", "| --- | --- | --- | --- | --- |"]
    for line in (*TABLE, *optional(ep_fx.NpuOptions(soc="A3", fused_exchange=True, main_grads_fp32=True))):
        emits = ", ".join(f"`{name}`" for name in line.emits) or "-"
        lines.append(f"| {line.name} | {line.takes} | {emits} | {line.fallback} | {line.source} |")
    return "\n".join(lines) + "\n"


def _npu_conditions() -> str:
    """What each kernel that may be emitted demands: all that is said of an argument in one row."""
    lines = ["| kernel | argument | must be | says |", "| --- | --- | --- | --- |"]
    for name, op in sorted(OPS.items()):
        wants: dict[str, dict[str, list[str]]] = {}
        for condition in op.conditions:
            wants.setdefault(condition.argument, {}).setdefault(condition.source, []).append(condition.wants)
        first = f"`{name}`"
        for argument, sources in wants.items():
            for source, texts in sources.items():
                text = "; ".join(dict.fromkeys(texts)).replace("torch.", "").replace("|", "\\|")
                lines.append(f"| {first} | `{argument}` | {text} | {source} |")
                first = ""
    return "\n".join(lines) + "\n"


def _npu_options() -> str:
    """The fields of `NpuOptions`, with their defaults and what they do."""
    texts = dict(re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", _arguments(ep_fx.NpuOptions), re.M | re.S))
    lines = ["| option | default | what |", "| --- | --- | --- |"]
    for field in dataclasses.fields(ep_fx.NpuOptions):
        what = " ".join(texts[field.name].replace("``", "`").split())
        lines.append(f"| `{field.name}` | `{field.default!r}` | {what} |")
    return "\n".join(lines) + "\n"


def _arguments(documented: type) -> str:
    """The part of a docstring that says what the arguments are."""
    return inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")[2]


def _npu_coverage() -> str:
    """What runs the nodes of the block of this file, lowered."""
    return "```\n" + str(ep_fx.explain(_module(fsdp=2, ep=2)).lowering()) + "```\n"


GENERATED: dict[str, Callable[[], str]] = {
    "reductions-fsdp2-ep2": lambda: _reductions(fsdp=2, ep=2),
    "reductions-fsdp1-ep4": lambda: _reductions(fsdp=1, ep=4),
    "reductions-replicate2-fsdp2-ep1": lambda: _reductions(replicate=2, fsdp=2, ep=1),
    "reductions-ep2-tp2": lambda: _reductions(ep=2, tp=2),
    "order-strict": lambda: _order("strict"),
    "order-early": lambda: _order("early"),
    "rules": _rules,
    "commands": _commands,
    "exit-codes": _exit_codes,
    "why": lambda: _example("why", "unshard_2"),
    "waiters": lambda: _example("waiters", "all_to_all_single_1"),
    "gradient": lambda: _example("gradient", "blocks.0.experts.w1"),
    "selector-words": _words,
    "assertion-failure": _failure,
    "models": _models,
    "npu-lowering": _npu_lowering,
    "npu-conditions": _npu_conditions,
    "npu-options": _npu_options,
    "npu-coverage": _npu_coverage,
}


def generate(text: str) -> str:
    """`text` with every generated block made anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}{GENERATED[match[2]]()}{match[3]}", text)


def main() -> int:
    """Writes, or with ``--check`` compares; returns the number of files that differ."""
    stale = 0
    with fake_world(4):
        for path in sorted(DOCS.glob("*.md")):
            old = path.read_text()
            new = generate(old)
            if new == old:
                continue
            stale += 1
            if "--check" in sys.argv:
                print(f"{path.name} is stale: run `make docs`")
            else:
                path.write_text(new)
                print(f"{path.name} written")
    return stale if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
