"""A small joint graph built by hand: embedding, a dense layer with an uneven bias, an MoE layer, head; fsdp 2 x ep 2.

Shaped as the passes leave it: every unit is gathered and freed in forward and in backward, the one MoE region is
lowered to its exchanges, gradients are reduced and scaled. Values are fake, with symbolic sizes.
"""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import ep_fx.ops as ops
from ep_fx.graph import Layout, Manifest, MeshSpec, NodeInfo, ParallelGraph, ParameterSpec, Phase, RegionSpec, set_info

EP = torch.ops.ep_fx
ATEN = torch.ops.aten
C10D = torch.ops._c10d_functional
DENSE, FSDP, EXPERT = "41", "42", "43"
"""Process-group names, as torch numbers them; no text may show them."""
REGION = "layers.1.moe.experts"
WIDTH, EXPERTS, TOP_K = 16, 4, 2


def mesh() -> MeshSpec:
    return MeshSpec({"fsdp": 2, "ep": 2}, {("fsdp", "ep"): DENSE, ("fsdp",): FSDP, ("ep",): EXPERT})


def parameter(
    name: str, unit: str, shape: tuple[int, ...], cuts: tuple[int, ...], expert: bool = False
) -> ParameterSpec:
    full = (shape[0] // 2, *shape[1:]) if expert else shape
    layout = Layout(shape, full, expert, ("fsdp",) if expert else ("fsdp", "ep"), 0, cuts)
    return ParameterSpec(name, name.replace(".", "_"), torch.float32, True, layout, unit)


def manifest() -> Manifest:
    parameters = (
        parameter("embed.weight", "root", (32, WIDTH), (8, 8, 8, 8)),
        parameter("layers.0.fc.weight", "layers.0", (WIDTH, WIDTH), (4, 4, 4, 4)),
        parameter("layers.0.fc.bias", "layers.0", (6,), (2, 2, 2, 0)),
        parameter("layers.1.moe.router.weight", "layers.1", (EXPERTS, WIDTH), (1, 1, 1, 1)),
        parameter("layers.1.moe.experts.w", REGION, (EXPERTS, WIDTH, WIDTH), (1, 1), expert=True),
        parameter("head.weight", "root", (32, WIDTH), (8, 8, 8, 8)),
    )
    region = RegionSpec(REGION, EXPERTS, ("layers.1.moe.experts.w",), REGION)
    return Manifest(mesh(), parameters, (), ("tokens",), ("tangents_0",), 1, (0,), regions=(region,))


class Builder:
    """Adds nodes and computes their fake values."""

    def __init__(self, facts: Manifest) -> None:
        self.graph = ParallelGraph(fx.Graph(), facts, provides=("expert-parallel", "fsdp"))
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.phase, self.fqn = Phase.FORWARD, ""

    def placeholder(self, name: str, value: torch.Tensor, dynamic: bool = False) -> fx.Node:
        node = self.graph.graph.placeholder(name)
        dims = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC] * value.dim()
        context: Any = StatelessSymbolicContext(dims)
        node.meta["val"] = self.mode.from_tensor(value, symbolic_context=context)
        set_info(node, NodeInfo(self.phase))
        return node

    def add(self, target: Any, *args: Any, fqn: str | None = None) -> fx.Node:
        values = fx.map_arg(args, lambda node: node.meta["val"])
        with self.mode:
            value = target(*values)
        node = self.graph.call(target, *args, phase=self.phase, fqn=self.fqn if fqn is None else fqn, value=value)
        set_info(node, NodeInfo(self.phase, self.fqn if fqn is None else fqn, "model.py:12"))
        return node

    def get(self, source: fx.Node, index: int) -> fx.Node:
        return self.add(operator.getitem, source, index)

    # -- FSDP ------------------------------------------------------------------------------------------------------
    def gather(self, unit: str) -> list[fx.Node]:
        specs = self.graph.manifest.units[unit]
        shards = []
        for spec in specs:
            shard = self.graph.placeholder(spec.placeholder)
            if not spec.layout.is_even:
                shard = self.add(EP.pad_shard.default, shard, 0, spec.layout.padded_size, fqn=unit)
            shards.append(shard)
        dims = specs[0].layout.gather_dims
        world, group = self.graph.manifest.mesh.size(*dims), self.graph.manifest.mesh.group(*dims)
        started = self.add(EP.unshard.default, shards, world, group, fqn=unit)
        done = self.add(EP.unshard_wait.default, started, fqn=unit)
        full = []
        for index, spec in enumerate(specs):
            value = self.get(done, index)
            if not spec.layout.is_even:
                value = self.add(EP.assemble.default, value, 0, list(spec.layout.shard_sizes), fqn=unit)
            full.append(value)
        return full

    def free(self, unit: str, values: Sequence[fx.Node]) -> None:
        self.add(EP.reshard.default, list(values), fqn=unit)

    def reduce(self, unit: str, grads: Sequence[fx.Node]) -> dict[str, fx.Node]:
        specs = self.graph.manifest.units[unit]
        dims = specs[0].layout.gather_dims
        world, group = self.graph.manifest.mesh.size(*dims), self.graph.manifest.mesh.group(*dims)
        inputs = []
        for spec, grad in zip(specs, grads, strict=True):
            cuts = list(spec.layout.shard_sizes)
            inputs.append(grad if spec.layout.is_even else self.add(EP.disassemble.default, grad, 0, cuts))
        done = self.add(EP.reduce_grad_wait.default, self.add(EP.reduce_grad.default, inputs, world, group))
        scaled = self.add(EP.scale_grad.default, done, self.graph.manifest.grad_divisor)
        result = {}
        for index, spec in enumerate(specs):
            value = self.get(scaled, index)
            if not spec.layout.is_even:
                value = self.add(EP.unpad_shard.default, value, 0, self.graph.placeholder(spec.placeholder))
            result[spec.name] = value
        return result

    # -- exchange --------------------------------------------------------------------------------------------------
    def context(self, counts: fx.Node, rows: fx.Node) -> list[fx.Node]:
        local = [EXPERTS // 2] * 2
        started = self.add(C10D.all_to_all_single.default, counts, local, local, EXPERT)
        done = self.add(C10D.wait_tensor.default, started)
        num_rows = self.add(ATEN.sym_size.int, rows, 0)
        with self.mode:
            received, splits = self.env.create_unbacked_symint(), [self.env.create_unbacked_symint() for _ in range(4)]
            indices = torch.empty(received, dtype=torch.int64)
            per_expert = torch.empty(EXPERTS // 2, dtype=torch.int64)
        value = ops.DispatchContext(
            indices, cast(Any, tuple(splits[:2])), cast(Any, tuple(splits[2:])), (num_rows.meta["val"],), per_expert
        )
        node = self.graph.call(ops.dispatch_context, counts, done, num_rows, 2, REGION, phase=self.phase, value=value)
        set_info(node, NodeInfo(self.phase, REGION, None))
        return [self.get(node, index) for index in range(5)]

    def send(self, rows: fx.Node, context: Sequence[fx.Node]) -> fx.Node:
        sent = self.add(EP.send_rows.default, rows, context[1])
        moved = self.add(C10D.all_to_all_single.default, sent, context[2], context[1], EXPERT)
        return self.add(EP.regroup.default, self.add(C10D.wait_tensor.default, moved), context[0])

    def give_back(self, rows: fx.Node, context: Sequence[fx.Node]) -> fx.Node:
        back = self.add(EP.ungroup.default, rows, context[0])
        moved = self.add(C10D.all_to_all_single.default, back, context[1], context[2], EXPERT)
        return self.add(EP.pad_rows.default, self.add(C10D.wait_tensor.default, moved), context[3])


def build() -> ParallelGraph:
    """The sample graph."""
    facts = manifest()
    b = Builder(facts)
    for spec in facts.parameters:
        shape = (spec.layout.shard_sizes[0], *spec.layout.full_shape[1:])
        b.placeholder(spec.placeholder, torch.empty(shape))
    tokens = b.placeholder("tokens", torch.empty(6, 2 * EXPERTS, dtype=torch.int64), dynamic=True)
    tangent = b.placeholder("tangents_0", torch.empty(48, 32), dynamic=True)

    # forward
    embed, head = b.gather("root")
    b.fqn = "embed"
    x0 = b.add(ATEN.view.default, b.add(ATEN.embedding.default, embed, tokens), [-1, WIDTH])
    weight, bias = b.gather("layers.0")
    b.fqn = "layers.0.fc"
    hidden = b.add(ATEN.mm.default, x0, b.add(ATEN.t.default, weight))
    scale = b.add(ATEN.sum.default, bias)
    b.fqn = "layers.0.act"
    act = b.add(ATEN.relu.default, b.add(ATEN.mul.Tensor, hidden, scale))
    b.fqn = "layers.0"
    x1 = b.add(ATEN.add.Tensor, x0, act)
    b.free("layers.0", [weight, bias])
    (router,) = b.gather("layers.1")
    b.fqn = "layers.1.moe.router"
    scores = b.add(ATEN._softmax.default, b.add(ATEN.mm.default, x1, b.add(ATEN.t.default, router)), -1, False)
    top = b.add(ATEN.topk.default, scores, TOP_K)
    top_w, top_i = b.get(top, 0), b.get(top, 1)
    b.free("layers.1", [router])
    b.fqn = REGION
    permuted = b.add(EP.permute.default, x1, top_i, EXPERTS)
    rows, counts, order = (b.get(permuted, index) for index in range(3))
    (experts,) = b.gather(REGION)
    b.fqn = REGION
    context = b.context(counts, rows)
    routed = b.send(rows, context)
    y = b.add(ATEN.relu.default, b.add(EP.grouped_mm.default, routed, experts, context[4], None, True))
    back = b.give_back(y, context)
    b.free(REGION, [experts])
    b.fqn = REGION
    moe = b.add(EP.unpermute.default, back, order, top_w)
    b.fqn = "layers.1"
    x2 = b.add(ATEN.add.Tensor, x1, moe)
    b.fqn = "head"
    logits = b.add(ATEN.mm.default, x2, b.add(ATEN.t.default, head))
    b.free("root", [embed, head])

    # backward
    b.phase = Phase.BACKWARD
    embed_b, head_b = b.gather("root")
    b.fqn = "head"
    g_head = b.add(ATEN.mm.default, b.add(ATEN.t.default, tangent), x2)
    g2 = b.add(ATEN.mm.default, tangent, head_b)
    b.free("root", [embed_b, head_b])
    b.fqn = REGION
    unpermuted = b.add(EP.unpermute_backward.default, g2, back, order, top_w)
    g_rows, g_top = b.get(unpermuted, 0), b.get(unpermuted, 1)
    (experts_b,) = b.gather(REGION)
    b.fqn = REGION
    g_y = b.add(ATEN.threshold_backward.default, b.send(g_rows, context), y, 0)
    product = b.add(EP.grouped_mm_backward.default, g_y, routed, experts_b, context[4], False, True)
    g_routed, g_experts = b.get(product, 0), b.get(product, 1)
    g_back = b.give_back(g_routed, context)
    b.free(REGION, [experts_b])
    b.fqn = REGION
    grads = b.reduce(REGION, [g_experts])
    count = b.add(ATEN.sym_size.int, x1, 0)
    g_x1 = b.add(EP.permute_backward.default, g_back, order, count, TOP_K)
    (router_b,) = b.gather("layers.1")
    b.fqn = "layers.1.moe.router"
    g_scores = b.add(ATEN.value_selecting_reduction_backward.default, g_top, -1, top_i, [count, EXPERTS], True)
    g_logits = b.add(ATEN._softmax_backward_data.default, g_scores, scores, -1, torch.float32)
    g_router = b.add(ATEN.mm.default, b.add(ATEN.t.default, g_logits), x1)
    g_x1r = b.add(ATEN.mm.default, g_logits, router_b)
    b.free("layers.1", [router_b])
    grads |= b.reduce("layers.1", [g_router])
    b.fqn = "layers.1"
    g1 = b.add(ATEN.add.Tensor, b.add(ATEN.add.Tensor, g2, g_x1), g_x1r)
    weight_b, bias_b = b.gather("layers.0")
    b.fqn = "layers.0.act"
    g_act = b.add(ATEN.threshold_backward.default, g1, act, 0)
    b.fqn = "layers.0.fc"
    g_scale = b.add(ATEN.sum.default, b.add(ATEN.mul.Tensor, g_act, hidden))
    g_bias = b.add(ATEN.expand.default, g_scale, [6])
    g_hidden = b.add(ATEN.mul.Tensor, g_act, scale)
    g_weight = b.add(ATEN.mm.default, b.add(ATEN.t.default, g_hidden), x0)
    g_x0 = b.add(ATEN.mm.default, g_hidden, weight_b)
    b.free("layers.0", [weight_b, bias_b])
    b.fqn = "layers.0.fc"
    grads |= b.reduce("layers.0", [g_weight, g_bias])
    b.fqn = "layers.0"
    g0 = b.add(ATEN.add.Tensor, g1, g_x0)
    b.fqn = "embed"
    shaped = b.add(ATEN.view.default, g0, [-1, 2 * EXPERTS, WIDTH])
    g_embed = b.add(ATEN.embedding_dense_backward.default, shaped, tokens, 32, -1, False)
    grads |= b.reduce("root", [g_embed, g_head])
    output = b.graph.graph.output(((logits,), tuple(grads[p.name] for p in facts.trainable), ()))
    set_info(output, NodeInfo(Phase.BACKWARD))
    b.graph.graph.lint()
    return b.graph


def build_logical() -> ParallelGraph:
    """Forward of one MoE region as captured: dispatch and combine are single nodes."""
    region = RegionSpec(REGION, EXPERTS, (), REGION)
    b = Builder(Manifest(MeshSpec({}, {}), (), (), ("rows", "counts"), (), 1, (), regions=(region,)))
    rows = b.placeholder("rows", torch.empty(6, WIDTH))
    counts = b.placeholder("counts", torch.empty(EXPERTS, dtype=torch.int64))
    b.fqn = REGION
    parts = b.add(EP.dispatch.default, rows, counts, None, 2, REGION)
    routed, indices, splits = b.get(parts, 0), b.get(parts, 3), b.get(parts, 4)
    back = b.add(EP.combine.default, b.add(ATEN.relu.default, routed), indices, splits, 6, REGION)
    set_info(b.graph.graph.output(((back,), (), ())), NodeInfo())
    return b.graph
