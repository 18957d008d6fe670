"""A training step written down node by node, valid under every rule: two dense layers around one MoE region.

    h = x @ first.t()    rows = permute(h)    y = unpermute(combine(experts(dispatch(rows))))    out = y @ last.t()

Forward and backward, sharded, with or without lowered exchanges; no pass is involved, so that the rules are tested
against a graph that was made independently of what they check.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal

import torch
from torch import fx

from ep_fx.graph import (
    MESH_DIMS,
    BufferSpec,
    Layout,
    Manifest,
    MeshSpec,
    NodeInfo,
    ParallelGraph,
    ParameterSpec,
    Phase,
    RegionSpec,
    info_of,
    set_info,
)
from ep_fx.ops import dispatch_context
from ep_fx.verify.computation import computation

aten, ops, c10d = torch.ops.aten, torch.ops.ep_fx, torch.ops._c10d_functional
EXPERTS, DIM, REGION = 4, 8, "block.experts"
TOKENS = "tokens"
"""Name of the group of exchanges."""
EXPERT_NAMES = ("block.experts.w1", "block.experts.w2")


def mesh_of(**sizes: int) -> MeshSpec:
    """A mesh whose groups are called after their dimensions, ``fsdp_ep``; tokens have a group of their own."""
    live = [d for d in MESH_DIMS if sizes.get(d, 1) > 1]
    some = (dims for n in range(1, len(live) + 1) for dims in combinations(live, n))
    return MeshSpec(sizes, {dims: "_".join(dims) for dims in some}, TOKENS if "ep" in live else "")


def layout_of(mesh: MeshSpec, shape: tuple[int, ...], split: bool) -> Layout:
    """Cut along dim 0 over everything that holds a share, unevenly where it does not divide.

    Args:
        split: dim 0 is split over ``ep`` first.
    """
    gather = mesh.live(("fsdp",) if split else ("fsdp", "ep"))
    full = shape[0] // mesh.size("ep") if split else shape[0]
    world = mesh.size(*gather)
    block = math.ceil(full / world)
    sizes = tuple(max(0, min(block, full - i * block)) for i in range(world))
    return Layout(shape, (full, *shape[1:]), split, gather, 0, sizes)


class Step:
    """The graph under construction, and after that its nodes by name.

    Args:
        replicate, fsdp, ep: sizes of the mesh.
        rows: first dimension of the dense weights; 8 is cut evenly, 6 over four ranks is not.
        policy: `Manifest.expert_reshard`.
        keep: forward's gathers are kept for backward (``reshard_after_forward=False``).
        frozen: names of parameters without gradient.
        backward: whether there is a backward half.
        sharded: whether the parameters are shards (the fsdp pass ran).
        lowered: whether exchanges are lowered; None: where ep > 1.
        local: every rank holds all experts, whatever `ep` is (``RegionSpec.ep_size`` 1).
        grad_reduce: `Manifest.grad_reduce`.
    """

    def __init__(
        self, *, replicate: int = 1, fsdp: int = 2, ep: int = 2, rows: int = 8, keep: bool = False,
        policy: Literal["strict", "early"] = "strict", frozen: tuple[str, ...] = (), backward: bool = True,
        sharded: bool = True, lowered: bool | None = None, local: bool = False,
        grad_reduce: Literal["mean", "sum"] = "mean",
    ) -> None:
        self.mesh = mesh_of(replicate=replicate, fsdp=fsdp, ep=ep)
        self.ep = 1 if local else ep
        self.lowered = self.ep > 1 if lowered is None else lowered
        self.policy, self.keep, self.sharded = policy, keep, sharded
        self.fx = fx.Graph()
        self.phase = Phase.FORWARD
        self.specs = [
            ParameterSpec(
                name, name.replace(".", "_"), torch.float32, backward and name not in frozen,
                self._layout(name, rows, local),
                "block.experts" if name in EXPERT_NAMES else name.split(".")[0],
            )
            for name in ("first.weight", *EXPERT_NAMES, "last.weight")
        ]
        self.by_name = {spec.name: spec for spec in self.specs}
        for spec in self.specs:
            self.fx.placeholder(spec.placeholder)
        for name in ("steps", "x", *(["tangent"] if backward else [])):
            self.fx.placeholder(name)
        manifest = Manifest(
            mesh=self.mesh, parameters=tuple(self.specs), buffers=(BufferSpec("steps", "steps", True),), inputs=("x",),
            tangents=("tangent",) if backward else (), num_outputs=1, differentiable=(0,) if backward else (),
            regions=(RegionSpec(REGION, EXPERTS, EXPERT_NAMES, "block.experts", backward, 1 if local else None),),
            grad_reduce=grad_reduce, reshard_after_forward=not keep, expert_reshard=policy,
        )
        provides = ("expert-parallel", "fsdp") if sharded else ("expert-parallel",) if self.lowered else ()
        self.full: dict[str, fx.Node] = {}
        self.gradients: dict[str, fx.Node] = {}
        out = self._forward()
        if backward:
            self._backward()
            self._reduce(grad_reduce)
        self.fx.output(((out,), tuple(self.gradients[s.name] for s in self.specs if s.trainable), ()))
        self.graph = ParallelGraph(self.fx, manifest, provides=provides)
        self.record()

    def record(self) -> None:
        """Takes what the graph computes now for what capture found."""
        self.graph.manifest = replace(self.graph.manifest, computation=computation(self.graph))

    def _layout(self, name: str, rows: int, local: bool) -> Layout:
        if name in EXPERT_NAMES:
            return layout_of(self.mesh, (EXPERTS, DIM, DIM), split=not local)
        return layout_of(self.mesh, (rows, DIM), split=False)

    def __getitem__(self, name: str) -> fx.Node:
        return next(node for node in self.fx.nodes if node.name == name)

    def call(self, target: Any, *args: Any, name: str | None = None) -> fx.Node:
        """A node of the current half, at the insertion point."""
        node = self.fx.create_node("call_function", target, args, name=name)
        set_info(node, NodeInfo(self.phase, "block", "model.py:7"))
        return node

    def items(self, node: fx.Node, *names: str) -> list[fx.Node]:
        """The elements of a node, named ``<node>_<name>``."""
        return [self.call(operator.getitem, node, i, name=f"{node.name}_{n}") for i, n in enumerate(names)]

    @contextmanager
    def after(self, node: fx.Node) -> Iterator[None]:
        """Inserts behind `node`, in its phase."""
        self.phase = info_of(node).phase
        with self.fx.inserting_after(node):
            yield

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Inserts before `node`, in its phase."""
        self.phase = info_of(node).phase
        with self.fx.inserting_before(node):
            yield

    # -- parameters ------------------------------------------------------------------------------------------------
    def gather(self, *names: str) -> None:
        """Makes `full` hold the whole parameters."""
        specs = [self.by_name[n] for n in names]
        self.full.update({s.name: self[s.placeholder] for s in specs})
        dims = specs[0].layout.gather_dims
        if not self.sharded or not dims or (self.keep and self.phase is Phase.BACKWARD):
            self.full.update({n: self.kept[n] for n in names if self.phase is Phase.BACKWARD and n in self.kept})
            return
        tag = f"{specs[0].unit.replace('.', '_')}_{self.phase.value}"
        shards = []
        for s in specs:
            uneven = len(set(s.layout.shard_sizes)) > 1
            pad = (s.layout.shard_dim, s.layout.padded_size)
            shard = self.full[s.name]
            shards.append(self.call(ops.pad_shard.default, shard, *pad, name=f"pad_{tag}") if uneven else shard)
        over = (self.mesh.size(*dims), self.mesh.group(*dims))
        started = self.call(ops.unshard.default, shards, *over, name=f"unshard_{tag}")
        done = self.call(ops.unshard_wait.default, started, name=f"wait_{tag}")
        for index, s in enumerate(specs):
            value = self.call(operator.getitem, done, index, name=f"full_{s.placeholder}_{self.phase.value}")
            if not s.layout.is_even:
                cut = (s.layout.shard_dim, list(s.layout.shard_sizes))
                value = self.call(ops.assemble.default, value, *cut, name=f"whole_{s.placeholder}_{self.phase.value}")
            self.full[s.name] = value
            self.kept[s.name] = value

    def free(self, *names: str, later: bool = False) -> None:
        """Reshards, unless backward needs the values (`later`) and they are kept for it."""
        kept = later and self.keep and self.phase is Phase.FORWARD
        if self.sharded and self.by_name[names[0]].layout.gather_dims and not kept:
            tag = f"{self.by_name[names[0]].unit.replace('.', '_')}_{self.phase.value}"
            self.call(ops.reshard.default, [self.full[n] for n in names], name=f"reshard_{tag}")

    # -- the exchange ----------------------------------------------------------------------------------------------
    def dispatch(self, rows: fx.Node, counts: fx.Node) -> fx.Node:
        """Rows to their experts; sets the context."""
        ep = self.ep
        if not self.lowered:
            node = self.call(ops.dispatch.default, rows, counts, None, ep, REGION, name="dispatch")
            results = self.items(node, "input", "weights", "counts", "indices", "splits")
            routed, _, self.counts, self.indices, self.splits = results
            self.num_rows = self.call(aten.sym_size.int, rows, 0, name="num_rows")
            return routed
        each = [EXPERTS // ep] * ep
        sent = self.call(c10d.all_to_all_single.default, counts, each, each, TOKENS, name="exchange_counts")
        done = self.call(c10d.wait_tensor.default, sent, name="counts_done")
        self.num_rows = self.call(aten.sym_size.int, rows, 0, name="num_rows")
        context = self.call(dispatch_context, counts, done, self.num_rows, ep, REGION, name="context")
        fields = ("indices", "input_splits", "output_splits", "input_shape", "counts")
        self.indices, self.into, self.out, self.shape, self.counts = self.items(context, *fields)
        return self.send(rows, "dispatch")

    def send(self, rows: fx.Node, name: str) -> fx.Node:
        """To the experts: dispatch and combine_backward."""
        if not self.lowered:
            return self.call(ops.combine_backward.default, rows, self.indices, self.splits, REGION, name=name)
        rows = self.call(ops.send_rows.default, rows, self.into, name=f"{name}_send")
        moving = self.call(c10d.all_to_all_single.default, rows, self.out, self.into, TOKENS, name=name)
        done = self.call(c10d.wait_tensor.default, moving, name=f"{name}_wait")
        return self.call(ops.regroup.default, done, self.indices, name=f"{name}_end")

    def bring_back(self, rows: fx.Node, name: str) -> fx.Node:
        """From the experts: combine and dispatch_backward."""
        if not self.lowered and name == "combine":
            return self.call(ops.combine.default, rows, self.indices, self.splits, self.num_rows, REGION, name=name)
        if not self.lowered:
            args = (rows, None, self.indices, self.splits, self.num_rows, REGION)
            return self.items(self.call(ops.dispatch_backward.default, *args, name=name), "end")[0]
        rows = self.call(ops.ungroup.default, rows, self.indices, name=f"{name}_ungroup")
        moving = self.call(c10d.all_to_all_single.default, rows, self.into, self.out, TOKENS, name=name)
        done = self.call(c10d.wait_tensor.default, moving, name=f"{name}_wait")
        return self.call(ops.pad_rows.default, done, self.shape, name=f"{name}_end")

    # -- the model -------------------------------------------------------------------------------------------------
    def _forward(self) -> fx.Node:
        self.kept: dict[str, fx.Node] = {}
        call = self.call
        self.gather("first.weight")
        first = call(aten.t.default, self.full["first.weight"], name="first_t")
        h = self.h = call(aten.mm.default, self["x"], first, name="h")
        self.free("first.weight")
        call(aten.add_.Scalar, self["steps"], 1, name="count_step")
        scores = call(aten._softmax.default, h, -1, False, name="scores")
        self.weights, ids = self.items(call(aten.topk.default, scores, 2, name="topk"), "weights", "ids")
        sorted_rows = call(ops.permute.default, h, ids, EXPERTS, name="permute")
        rows, counts, self.order = self.items(sorted_rows, "rows", "counts", "order")
        self.gather(*EXPERT_NAMES)
        self.routed = self.dispatch(rows, counts)
        w1, w2 = (self.full[name] for name in EXPERT_NAMES)
        self.up = call(ops.grouped_mm.default, self.routed, w1, self.counts, None, False, name="up")
        self.act = call(aten.relu.default, self.up, name="act")
        down = call(ops.grouped_mm.default, self.act, w2, self.counts, None, False, name="down")
        if self.policy == "early":
            self.free(*EXPERT_NAMES, later=True)
        self.back = self.bring_back(down, "combine")
        if self.policy == "strict":
            self.free(*EXPERT_NAMES, later=True)
        self.y = call(ops.unpermute.default, self.back, self.order, self.weights, name="y")
        self.gather("last.weight")
        out = call(aten.mm.default, self.y, call(aten.t.default, self.full["last.weight"], name="last_t"), name="out")
        self.free("last.weight", later=True)
        return out

    def _backward(self) -> None:
        self.phase = Phase.BACKWARD
        call, tangent = self.call, self["tangent"]
        self.gather("last.weight")
        grad_y = call(aten.mm.default, tangent, self.full["last.weight"], name="grad_y")
        self.free("last.weight")
        turned = call(aten.t.default, tangent, name="tangent_t")
        self.gradients["last.weight"] = call(aten.mm.default, turned, self.y, name="grad_last")
        undone = call(
            ops.unpermute_backward.default, grad_y, self.back, self.order, self.weights, name="unpermute_backward"
        )
        grad_back, grad_weights = self.items(undone, "rows", "weights")
        self.gather(*EXPERT_NAMES)
        grad_down = self.send(grad_back, "combine_backward")
        grad_act = self._experts_backward("down_backward", grad_down, self.act, EXPERT_NAMES[1])
        grad_up = call(aten.threshold_backward.default, grad_act, self.up, 0, name="act_backward")
        grad_routed = self._experts_backward("up_backward", grad_up, self.routed, EXPERT_NAMES[0])
        if self.policy == "early":
            self.free(*EXPERT_NAMES)
        grad_rows = self.bring_back(grad_routed, "dispatch_backward")
        if self.policy == "strict":
            self.free(*EXPERT_NAMES)
        tokens = call(aten.sym_size.int, self.h, 0, name="tokens")
        grad_h = call(ops.permute_backward.default, grad_rows, self.order, tokens, 2, name="permute_backward")
        scattered = call(aten.add.Tensor, grad_h, call(aten.sum.default, grad_weights), name="grad_h")
        turned = call(aten.t.default, scattered, name="grad_h_t")
        self.gradients["first.weight"] = call(aten.mm.default, turned, self["x"], name="grad_first")

    def _experts_backward(self, name: str, grad: fx.Node, x: fx.Node, parameter: str) -> fx.Node:
        args = (grad, x, self.full[parameter], self.counts, False, False)
        both = self.call(ops.grouped_mm_backward.default, *args, name=name)
        grad_x, self.gradients[parameter] = self.items(both, "x", "weight")
        return grad_x

    # -- gradients -------------------------------------------------------------------------------------------------
    def _reduce(self, grad_reduce: str) -> None:
        divisor = float(self.mesh.data_ranks) if grad_reduce == "mean" else 1.0
        units: dict[str, list[ParameterSpec]] = {}
        for spec in self.specs:
            if spec.trainable and self.sharded:
                units.setdefault(spec.unit, []).append(spec)
        for unit, specs in units.items():
            self._reduce_unit(unit.replace(".", "_"), specs, divisor)

    def _reduce_unit(self, tag: str, specs: list[ParameterSpec], divisor: float) -> None:
        gather = specs[0].layout.gather_dims
        rest = [d for d in ("replicate", "fsdp", "ep") if self.mesh.size(d) > 1 and d not in gather]
        rest = [d for d in rest if d != "ep" or not specs[0].layout.is_expert]
        current: Any = [self._cut(s) for s in specs]
        if gather:
            args = (self.mesh.size(*gather), self.mesh.group(*gather))
            current = self.call(ops.reduce_grad.default, current, *args, name=f"reduce_{tag}")
            current = self.call(ops.reduce_grad_wait.default, current, name=f"reduce_{tag}_wait")
        if rest:
            current = self.call(ops.all_reduce_grad.default, current, self.mesh.group(*rest), name=f"all_reduce_{tag}")
            current = self.call(ops.reduce_grad_wait.default, current, name=f"all_reduce_{tag}_wait")
        if divisor != 1:
            current = self.call(ops.scale_grad.default, current, divisor, name=f"scale_{tag}")
        for index, s in enumerate(specs):
            if isinstance(current, list):
                value = current[index]
            else:
                value = self.call(operator.getitem, current, index, name=f"shard_{s.placeholder}")
            if len(set(s.layout.shard_sizes)) > 1:
                like = (s.layout.shard_dim, self[s.placeholder])
                value = self.call(ops.unpad_shard.default, value, *like, name=f"unpad_{tag}")
            self.gradients[s.name] = value

    def _cut(self, spec: ParameterSpec) -> fx.Node:
        layout, gradient = spec.layout, self.gradients[spec.name]
        if layout.is_even or not layout.gather_dims:
            return gradient
        cut = (layout.shard_dim, list(layout.shard_sizes))
        return self.call(ops.disassemble.default, gradient, *cut, name=f"cut_{spec.placeholder}")
