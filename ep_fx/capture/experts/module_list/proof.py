"""What a block with a list of experts computes, found by looking and then proven, or not used at all.

    find    between which statements, and from which of its variables, the block makes
            y = sum over k of weight[t,k] * expert[id[t,k]](x[t])         (or with the weight before the expert)
    prove   with these statements replaced by one call, the block gives the same outputs, buffers and gradients on
            every probe: many routings, experts without a token, one token, all tokens to one expert, tokens, weights
            and answers of all sizes, infinities, both modes, with and without autograd
    refuse  what asks for or sets modes of torch (autocast, ...), by its text: see `ambient`
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ep_fx.capture.experts.module_list.compare import alike
from ep_fx.capture.experts.module_list.looks import Look, changed, look_at, shape_expression, state_changed
from ep_fx.capture.experts.module_list.loop import ORDERS, Loop, call_of
from ep_fx.capture.experts.module_list.probe import Probe, Result, block_dim, outputs_differ, rows_differ, same
from ep_fx.capture.experts.module_list.source import CALL, Method, SourceError, methods_of
from ep_fx.capture.experts.module_list.stacked import StackedExperts, difference
from ep_fx.capture.experts.module_list.trials import Case, cases

_TRIES = 16


class NotProven(ValueError):
    """Why a block was not recognised; the text is for the user."""


@dataclass(frozen=True)
class Proof:
    """A recognised block: its methods with the loops replaced, and the ranks of input this was proven for."""

    methods: Mapping[str, Callable[..., Any]]
    ranks: frozenset[int]
    where: str


def prove(parent: nn.Module, attribute: str) -> Proof:
    """The proof that `parent` sends tokens through its list of experts `attribute` in the way of an MoE layer.

    Raises:
        NotProven: it does something else, or nothing could be shown.
    """
    experts = getattr(parent, attribute)
    if reason := difference(list(experts)):
        raise NotProven(reason)
    try:
        methods = methods_of(type(parent), attribute)
        if not methods:
            raise NotProven(f"no method of {type(parent).__name__} uses self.{attribute} in a way that is understood")
        dim = block_dim(experts[0])
        if dim is None:
            raise NotProven("one expert does not take rows [n, D] to rows [n, D]")
        if rows_differ(experts, lambda two: StackedExperts(two, attribute), dim):
            raise NotProven("the experts give other rows when they are run together: they are not row by row")
        return _Search(parent, attribute, methods, dim).proof()
    except NotProven:
        raise
    except SourceError as error:
        raise NotProven(str(error)) from error
    except Exception as error:  # any: what fails on a trial is the user's code
        raise NotProven(f"a trial failed, {type(error).__name__}: {error}") from error


Seen = dict[tuple[str, int], dict[int, Look]]


class _Search:
    """From looks at the block's variables to a proof."""

    def __init__(self, parent: nn.Module, attribute: str, methods: list[Method], dim: int) -> None:
        self.parent, self.attribute, self.dim = parent, attribute, dim
        self.methods = {method.name: method for method in methods}
        self.probe = Probe(parent, attribute, dim)
        self.number = len(self.probe.known)
        self._layers: dict[tuple[Any, ...], Tensor] = {}
        self._wanted: dict[Case, Result | None] = {}
        self._unseen, self._except = "", ""
        self._kept: list[Tensor] = []

    def proof(self) -> Proof:
        """See `prove`."""
        ranks, failure = [], None
        for rank in (3, 2):
            try:
                self.probe.run(cases(rank)[0], {}, self.probe.listed, {})
                ranks.append(rank)
            except Exception as error:  # any: the block is the user's, and it may not take inputs of this rank
                failure = failure or error
        if not ranks:
            unseen = "".join(f"; in {m.file}, {u}" for m in self.methods.values() if (u := m.unseen_sites()))
            where = next(iter(self.methods.values())).where
            raise NotProven(
                f"with the loop at {where} it could not be run on tokens [B, S, {self.dim}] or [T, {self.dim}]: "
                f"{failure}{unseen}"
            )
        possible = [case for case in cases(ranks[0]) if case.grad != "inference" and self._eager(case) is not None]
        seen = [self._observe(self.probe, case) for case in possible]
        places = list(dict.fromkeys(place for run in seen for place in run))
        if not places:
            raise NotProven("its forward ran without coming to the loop over experts")
        found = [list(itertools.islice(self._loops(place, seen), _TRIES)) for place in places]
        for place, loops in zip(places, found, strict=True):
            if not loops and self._unseen:
                raise NotProven(f"in {self.methods[place[0]].file}, {self._unseen}")
            if not loops and self._except:
                raise NotProven(
                    f"the loop over experts at {self.methods[place[0]].where} is an MoE layer except for {self._except}"
                )
            if not loops:
                raise NotProven(
                    f"at {self.methods[place[0]].where} no ids [T, K] and weights [T, K] among the local variables "
                    "explain what comes out of the loop over experts"
                )
        reason = ""
        for choice in itertools.islice(itertools.product(*found), _TRIES):
            chosen = self._in_own_dtypes(dict(zip(places, choice, strict=True)), ranks[0])
            proven, reason = self._proven(chosen, ranks)
            if proven and (differs := self._differs_in_own_dtypes(chosen, proven[0])):
                raise NotProven(
                    f"with the loop at {self.methods[places[0][0]].where} taken as an MoE layer {differs}"
                )
            if proven:
                return Proof(self._replaced(chosen), frozenset(proven), self.methods[places[0][0]].where)
        raise NotProven(f"with the loop at {self.methods[places[0][0]].where} taken as an MoE layer {reason}")

    def _eager(self, case: Case) -> Result | None:
        """What the block gives as it is; None: it takes no tokens of this special kind, and has nothing to prove."""
        if case not in self._wanted:
            try:
                self._wanted[case] = self.probe.run(case, {}, self.probe.listed, {})
            except Exception:  # any: the block is the user's
                if case.kind == "plain":
                    raise
                self._wanted[case] = None
        return self._wanted[case]

    def _observe(self, probe: Probe, case: Case) -> Seen:
        seen: Seen = {}
        copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

        def look(name: str) -> Callable[[int, int, dict[str, Any]], None]:
            def note(site: int, index: int, variables: dict[str, Any]) -> None:
                looks = seen.setdefault((name, site), {})
                if index in looks:
                    raise NotProven(f"{name} runs more than once in one forward")
                looks[index] = look_at(variables, probe.block, copies, case, probe.known.scale)

            return note

        methods = {name: method.observed(look(name)) for name, method in self.methods.items()}
        probe.run(case, methods, probe.listed, {})
        return {place: looks for place, looks in seen.items() if set(looks) != {-1}}

    def _loops(self, place: tuple[str, int], seen: list[Seen]) -> Iterator[Loop]:
        """What the statements of a site may compute, the longest windows first."""
        method, number = self.methods[place[0]], place[1]
        site = method.sites[number]
        runs = [run[place] for run in seen if place in run]
        for start in range(site.first + 1):
            for end in range(site.last + 1, max(runs[0]) + 1):
                window = method.window(number, start, end)
                if window.more:
                    continue
                if unseen := method.unseen(number, start, end):
                    self._unseen = unseen
                    continue
                later = method.read_after(number, end)
                targets = (window.stored & later) | changed(runs, start, end, later - window.stored)
                if len(targets) != 1 or state_changed(runs, start, end):
                    continue
                target = targets.pop()
                yield from self._explanations(runs, number, start, end, target, window.read)

    def _explanations(
        self, runs: list[dict[int, Look]], site: int, start: int, end: int, target: str, read: set[str]
    ) -> Iterator[Loop]:
        before, after = runs[0][start].tensors, runs[0][end].tensors
        if target not in after:
            return
        latest = {name: -place for place, name in enumerate(before)}
        names = sorted(before, key=lambda name: (name not in read, latest[name]))
        shape = shape_expression(target, runs, start, end)
        if shape is None:
            return
        for x, ids in itertools.product(names, names):
            if not self._fits(before[x], before[ids]):
                continue
            one = before[ids].shape == before[x].shape[:-1]
            weighing = [w for w in names if self._weighs(before[x], before[ids], before[w])]
            for weights, order, adds in itertools.product([*weighing, None], ORDERS, (False, True)):
                by_expert = weights is not None and before[weights].numel() != before[ids].numel()
                loop = Loop(site, start, end, x, ids, weights, order, one, by_expert, target, adds, shape)
                failed = next((run for run in runs if not self._explains(run, loop)), None)
                if failed is None:
                    yield loop
                elif failed is not runs[0] and start in failed and failed[start].case.what != runs[0][start].case.what:
                    self._except = failed[start].case.what

    def _fits(self, x: Tensor, ids: Tensor) -> bool:
        if not x.is_floating_point() or x.dim() < 2 or x.shape[-1] != self.dim or ids.is_floating_point():
            return False
        tokens = x.numel() // self.dim
        lead = tuple(x.shape[:-1])
        if ids.dtype == torch.bool or not (ids.shape == lead or tuple(ids.shape[:-1]) in (lead, (tokens,))):
            return False
        return ids.numel() > 0 and int(ids.min()) >= 0 and int(ids.max()) < self.number

    def _weighs(self, x: Tensor, ids: Tensor, weights: Tensor) -> bool:
        if not weights.is_floating_point():
            return False
        tokens = x.numel() // self.dim
        by_expert = weights.dim() > 1 and weights.shape[-1] == self.number and weights.numel() == tokens * self.number
        return weights.shape == ids.shape or weights.numel() == ids.numel() or by_expert

    def _explains(self, run: dict[int, Look], loop: Loop) -> bool:
        """Whether `loop` gives the value that its target had in this run."""
        if loop.end not in run:
            return False
        before, want = run[loop.start].tensors, run[loop.end].tensors.get(loop.target)
        start = before.get(loop.target)
        if want is None or (loop.adds and (start is None or start.shape != want.shape)):
            return False
        x, ids = before[loop.x], before[loop.ids]
        weights = None if loop.weights is None else before[loop.weights]
        self.probe.known.scale = run[loop.start].scale
        key = (id(x), id(ids), id(weights), loop.order)
        if key not in self._layers:
            with torch.no_grad():
                self._layers[key] = call_of(self.probe.known, self.number)(
                    x, ids, weights, loop.order, loop.one_choice, loop.by_expert, (-1, self.dim), None
                )
            self._kept += [x, ids] if weights is None else [x, ids, weights]
        got = self._layers[key]
        if got.numel() != want.numel() or got.dtype != want.dtype:
            return False
        got = got.reshape(want.shape)
        broken = run[loop.start].case.kind == "broken"
        return alike(start + got if loop.adds and start is not None else got, want, broken=broken)

    def _in_own_dtypes(self, chosen: dict[tuple[str, int], Loop], rank: int) -> dict[tuple[str, int], Loop]:
        """The loops with the dtypes that their results have in the block's own dtypes."""
        probe = Probe(self.parent, self.attribute, self.dim, own_dtypes=True)
        if probe.dtype in (torch.float32, torch.float64):
            return chosen
        result = dict(chosen)
        for case in cases(rank)[:2]:
            for place, looks in self._observe(probe, case).items():
                loop = chosen[place]
                x, y = looks[loop.start].tensors[loop.x], looks[loop.end].tensors[loop.target]
                if x.dtype != y.dtype:
                    result[place] = replace(loop, dtype=y.dtype)
        return result

    def _differs_in_own_dtypes(self, chosen: Mapping[tuple[str, int], Loop], rank: int) -> str:
        """What the block does in its own dtypes only, as a guard against overflow, in words."""
        probe = Probe(self.parent, self.attribute, self.dim, own_dtypes=True)
        if probe.dtype == torch.float64:
            return ""
        methods, attributes = self._replaced(chosen), {CALL: call_of(probe.known, self.number)}
        tolerance = 1e-3 if probe.dtype == torch.float32 else 0.2
        special = [case for case in cases(rank) if case.kind == "broken" and self._eager(case) is not None]
        for case in (*cases(rank)[:2], *special):
            want = probe.run(case, {}, probe.listed, {})
            got = probe.run(case, methods, probe.known, attributes)
            if reason := outputs_differ(got, want, tolerance, case.kind == "broken"):
                return f"in {probe.dtype} {reason} for {case.what}"
        return ""

    def _replaced(self, chosen: Mapping[tuple[str, int], Loop]) -> dict[str, Callable[..., Any]]:
        methods: dict[str, Callable[..., Any]] = {}
        for name, method in self.methods.items():
            own = [loop for (place, _), loop in chosen.items() if place == name]
            windows = [(loop.site, loop.start, loop.end, loop.text(method.self_name)) for loop in own]
            methods[name] = method.replaced(windows)
        return methods

    def _proven(self, chosen: Mapping[tuple[str, int], Loop], ranks: list[int]) -> tuple[list[int], str]:
        """Ranks of input for which all probes agree, and the first thing that did not."""
        methods, proven, first = self._replaced(chosen), [], ""
        attributes = {CALL: call_of(self.probe.known, self.number)}
        if any(loop.dtype for loop in chosen.values()):  # the dtype holds for the block's own dtypes, not for fp64
            plain = {place: replace(loop, dtype=None) for place, loop in chosen.items()}
            methods = self._replaced(plain)
        for rank in ranks:
            reason = None
            for case in cases(rank):
                try:
                    want = self._eager(case)
                    if want is None:
                        continue
                    got = self.probe.run(case, methods, self.probe.known, attributes)
                    reason = same(got, want, broken=case.kind == "broken")
                    if reason is not None and case.what != cases(rank)[0].what:
                        reason = f"{reason} for {case.what}"
                except Exception as error:  # any: the block is the user's
                    reason = f"it failed, {type(error).__name__}: {error}"
                if reason is not None:
                    break
            if reason is None:
                proven.append(rank)
            first = first or reason or ""
        return proven, first
