"""The facts at the head of a graph's text, and back: mesh, groups, passes, policies, regions, placeholders.

    mesh fsdp 2 x ep 2, 4 data ranks
    groups "fsdp", "fsdp,ep", "ep"
    policy grad_reduce=mean, reshard_after_forward=true, expert_reshard=strict, prefetch_depth=0
    region layers.0.experts: 4 experts over 2 ranks, unit layers.0.experts, parameters %p3..%p5
      %p3: f32[1, 8] = parameter "experts.w1"  f32[2, 8] of [4, 8] over ep, dim 0 cut 2 x 1 over fsdp; unit experts

Everything in the Manifest stands here, in the placeholders or at the end, but for the names of process groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ep_fx.graph.groups import GroupTexts
from ep_fx.graph.literals import Reader, shorten
from ep_fx.graph.manifest import MESH_DIMS, Layout, Manifest, MeshSpec, ParameterSpec, RegionSpec
from ep_fx.graph.options import Word, hints, read, write
from ep_fx.graph.texts import layout_text, mesh_text
from ep_fx.graph.values import dtype_text

_MESH = re.compile(r"(?P<sizes>1 rank|\w+ \d+(?: x \w+ \d+)*), (?P<ranks>\d+) data ranks?")
_MOST = 2**24
"""More parameters or ranks than this, and the text is damaged."""
_POLICIES = ("grad_reduce", "reshard_after_forward", "expert_reshard", "prefetch_depth")
_PLAIN_NAME = re.compile(r"[\w./-]+")
_NAME = r'(?:[\w./-]+|"(?:[^"\\]|\\.)*")'
_OTHER = re.compile(r'(?:^|; )placeholder ("(?:[^"\\]|\\.)*")$')
_REGION = re.compile(
    rf"(?P<name>{_NAME}): (?P<experts>\d+) experts(?: over (?P<ranks>\d+) ranks?)?, unit (?P<unit>{_NAME}), "
    r"parameters (?P<parameters>.*?)(?P<no_backward>; no backward)?"
)
_CUT = r"(?:\d+ x )?\d+"
_PARAMETER = re.compile(
    r"(?P<dtype>\w+)\[(?P<full>[\d, ]*)\](?: of \[(?P<shape>[\d, ]*)\])?(?P<expert> over ep)?"
    r"(?:, dim (?P<tp>\d+) over tp(?: in (?P<blocks>\d+) blocks)?)?, "
    rf"(?:whole|dim (?P<dim>\d+) cut (?P<sizes>{_CUT}(?: \+ {_CUT})*) "
    r"over (?P<over>[\w,]*))"
    rf"; unit (?P<unit>{_NAME})(?P<frozen>; frozen)?(?P<zero>; zero gradient)?"
)


# -- writing -------------------------------------------------------------------------------------------------------
def name_text(name: str) -> str:
    """A module path, quoted where it is none."""
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def fact_lines(manifest: Manifest, provides: Sequence[str]) -> list[str]:
    """Lines about mesh, passes and policies."""
    lines = [f"mesh {mesh_text(manifest.mesh)}", *_groups_line(manifest.mesh)]
    lines.append(f"passes {', '.join(map(name_text, provides)) or 'none'}")
    lines.append("policy " + ", ".join(f"{name}={write(getattr(manifest, name))}" for name in _POLICIES))
    return lines


def region_lines(manifest: Manifest) -> list[str]:
    """One line for each run of each region."""
    numbers = {p.name: f"%p{i}" for i, p in enumerate(manifest.parameters)}
    return [_region_line(region, numbers) for region in manifest.regions]


def _groups_line(mesh: MeshSpec) -> list[str]:
    texts = GroupTexts(mesh)
    gathers = ", ".join(f'"{text}"' for text in texts.of_dims)
    exchange = f'; exchanges over "{texts.text(mesh.exchange)}"' if mesh.exchange else ""
    return [f"groups {gathers or 'none'}{exchange}"] if gathers or exchange else []


def _region_line(region: RegionSpec, numbers: dict[str, str]) -> str:
    over = "" if region.ep_size is None else f" over {region.ep_size} rank{'' if region.ep_size == 1 else 's'}"
    names = shorten([numbers.get(name) or json.dumps(name) for name in region.parameters])
    ending = "" if region.has_backward else "; no backward"
    head = f"region {name_text(region.name)}: {region.num_experts} experts{over}, unit {name_text(region.unit)}"
    return f"{head}, parameters {', '.join(names) or 'none'}{ending}"


def parameter_facts(spec: ParameterSpec, zero_gradient: bool) -> str:
    """What the Manifest says of a parameter, its name apart."""
    text = f"{dtype_text(spec.dtype)}{layout_text(spec.layout)}; unit {name_text(spec.unit)}"
    return text + ("" if spec.trainable else "; frozen") + ("; zero gradient" if zero_gradient else "")


def computation_lines(manifest: Manifest) -> list[str]:
    """What capture recorded of how each result is computed, at the end of the text."""
    if not manifest.computation:
        return []
    numbers = manifest.computation.items()
    lines = [f"  {number % 2**64:016x} {json.dumps(what, ensure_ascii=False)}" for what, number in numbers]
    return ["", "computes:", *lines]


def usual_placeholder(what: str, name: str) -> str:
    """Name of the placeholder of a parameter, a buffer, or the tangent number `name`, as capture gives it."""
    prefix = {"parameter": "param", "buffer": "buffer", "tangent": "tangent"}[what]
    return f"{prefix}_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}"


def placeholder_fact(fact: str, target: str, usual: str) -> str:
    """`fact`, and the name of the placeholder where it is not the usual one."""
    return fact if target == usual else "; ".join([*([fact] if fact else []), f"placeholder {json.dumps(target)}"])


# -- reading -------------------------------------------------------------------------------------------------------
@dataclass
class Head:
    """What the lines above the placeholders say.

    Args:
        nodes: number of nodes of the graph.
        device: device of its values.
        sizes: with which symbols were traced.
        outputs: number of outputs that are due.
        mesh: with the texts of the groups as their names.
        provides: passes that ran.
        policies: fields of the Manifest.
        regions: each with the texts of its parameters: ``%p3``, or a name.
    """

    nodes: int | None = None
    device: str = "cpu"
    sizes: dict[str, int] = field(default_factory=dict)
    outputs: int = 0
    mesh: MeshSpec = field(default_factory=lambda: MeshSpec({}, {}))
    provides: tuple[str, ...] = ()
    policies: dict[str, Any] = field(default_factory=dict)
    regions: list[RegionSpec] = field(default_factory=list)
    _has_mesh: bool = False

    def check(self) -> None:
        """Raises where the head lacks what everything below is read by.

        Raises:
            ValueError: it has no mesh.
        """
        if not self._has_mesh:
            raise ValueError("expected a line 'mesh ..' above this one")

    def check_gathers(self, dims: tuple[str, ...]) -> None:
        """Raises where a parameter that is cut over `dims` has no group to be gathered over.

        Raises:
            ValueError: the mesh has no such group.
        """
        if dims and dims not in self.mesh.groups:
            known = ", ".join(map(",".join, self.mesh.groups)) or "none"
            raise ValueError(f"the mesh has no group {','.join(dims)!r} to gather over; its groups: {known}")

    def read(self, line: str) -> None:
        """Takes in one line.

        Raises:
            ValueError: it says nothing that stands in a head.
        """
        word, _, rest = line.partition(" ")
        reader = getattr(self, f"_{word}", None)
        if reader is None:
            raise ValueError("expected graph, sizes, mesh, groups, passes, policy, unit or region")
        reader(rest)

    def _graph(self, text: str) -> None:
        match = re.match(r"of (\d+) nodes?(?: on (\S+?))?: .*; returns (\d+) outputs?$", text)
        if match is None:
            raise ValueError("expected 'graph of .. nodes on .. : .. forward, .. backward; returns .. outputs'")
        self.nodes, self.device, self.outputs = int(match[1]), match[2] or "cpu", int(match[3])

    def _sizes(self, text: str) -> None:
        self.sizes = {name: int(size) for name, size in re.findall(r"\b(s\d+)=(\d+)", text)}

    def _mesh(self, text: str) -> None:
        match = _MESH.fullmatch(text)
        if match is None:
            raise ValueError("expected 'mesh DIM SIZE x DIM SIZE, .. data ranks', or 'mesh 1 rank, 1 data rank'")
        pairs = [part.split() for part in match["sizes"].split(" x ")] if match["sizes"] != "1 rank" else []
        sizes = {dim: int(size) for dim, size in pairs}
        if len(sizes) != len(pairs) or not sizes.keys() <= set(MESH_DIMS) or 0 in sizes.values():
            raise ValueError(f"expected each of {', '.join(MESH_DIMS)} once at most, and at least one rank along it")
        mesh = MeshSpec(sizes, {})
        if mesh.data_ranks != int(match["ranks"]):
            raise ValueError(f"these sizes make {mesh.data_ranks} data ranks, the text says {match['ranks']}")
        self.mesh, self._has_mesh = mesh, True

    def _groups(self, text: str) -> None:
        self.check()
        gathers, _, exchange = text.partition("; exchanges over ")
        names = [json.loads(part) for part in re.findall(r'"[^"]*"', gathers)]
        groups = {tuple(name.split(",")): name for name in names}
        for dims in groups:
            if self.mesh.live(dims) != dims:
                raise ValueError(f"the mesh has no dimensions {','.join(dims)!r} of several ranks, in mesh order")
        self.mesh = MeshSpec(self.mesh.sizes, groups, json.loads(exchange) if exchange else "")

    def _passes(self, text: str) -> None:
        self.provides = () if text == "none" else tuple(_name(part) for part in re.findall(_NAME, text))

    def _policy(self, text: str) -> None:
        kinds = hints(Manifest)
        for part in text.split(", "):
            name, _, value = part.partition("=")
            if name not in _POLICIES:
                raise ValueError(f"no policy {name!r}; policies: {', '.join(_POLICIES)}")
            self.policies[name] = read(kinds[name], Word(value))

    def _unit(self, text: str) -> None:
        """For readers: units follow from the parameters."""

    def _region(self, text: str) -> None:
        match = _REGION.fullmatch(text)
        if match is None:
            raise ValueError("expected 'region NAME: .. experts over .. ranks, unit NAME, parameters ..'")
        if match["ranks"] and not 0 < int(match["ranks"]) <= _MOST:
            raise ValueError(f"no experts lie over {match['ranks']} ranks")
        names = () if match["parameters"] == "none" else tuple(_run(match["parameters"]))
        self.regions.append(
            RegionSpec(
                _name(match["name"]),
                int(match["experts"]),
                names,
                _name(match["unit"]),
                not match["no_backward"],
                int(match["ranks"]) if match["ranks"] else None,
            )
        )


def read_parameter(text: str, name: str, placeholder: str) -> tuple[ParameterSpec, bool]:
    """The parameter of which `parameter_facts` says `text`, and whether its gradient is zero.

    Raises:
        ValueError: the text has another form.
    """
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ValueError("expected 'DTYPE[shape], dim .. cut .. over ..; unit NAME' after the parameter's name")
    full = _ints(match["full"])
    shape = full if match["shape"] is None else _ints(match["shape"])
    gather = tuple(match["over"].split(",")) if match["over"] else ()
    tp = None if match["tp"] is None else int(match["tp"])
    is_expert, dim, blocks = match["expert"] is not None, int(match["dim"] or 0), int(match["blocks"] or 1)
    layout = Layout(shape, full, is_expert, gather, dim, _cuts(match, full), tp, blocks)
    if dim >= max(len(full), 1) or (tp is not None and tp >= len(full)):
        raise ValueError(f"{list(full)} has no dimension {dim if tp is None else max(dim, tp)}")
    dtype = Reader(match["dtype"], {}).value()
    spec = ParameterSpec(name, placeholder, dtype, not match["frozen"], layout, _name(match["unit"]))
    return spec, bool(match["zero"])


def read_computation(line: str) -> tuple[str, int]:
    """What a line of the end says is computed, and its number."""
    number, _, what = line.partition(" ")
    value = int(number, 16)
    return str(json.loads(what)), value - 2**64 if value >= 2**63 else value


def read_placeholder(fact: str, usual: str) -> tuple[str, str]:
    """The fact proper, and the name of the placeholder."""
    match = _OTHER.search(fact)
    return (fact[: match.start()], str(json.loads(match[1]))) if match else (fact, usual)


def _cuts(match: re.Match[str], full: tuple[int, ...]) -> tuple[int, ...]:
    if match["dim"] is None:
        return full[:1] or (1,)
    sizes: list[int] = []
    for part in match["sizes"].split(" + "):
        times, cross, size = part.partition(" x ")
        if cross and int(times) > _MOST:
            raise ValueError(f"no mesh has {times} ranks")
        sizes += [int(size)] * int(times) if cross else [int(times)]
    return tuple(sizes)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _name(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _run(text: str) -> list[str]:
    """The names in ``%p3..%p5, %p8``."""
    found: list[str] = []
    for part in re.findall(r'%p\d+\.\.%p\d+|%p\d+|"(?:[^"\\]|\\.)*"', text):
        first, dots, last = part.partition("..")
        if dots and part.startswith("%"):
            if int(last[2:]) - int(first[2:]) > _MOST:
                raise ValueError(f"no graph has the parameters {part}")
            found += [f"%p{i}" for i in range(int(first[2:]), int(last[2:]) + 1)]
        else:
            found.append(_name(part))
    return found
