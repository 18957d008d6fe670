"""Joint graphs of any size without a model and without a trace: a chain of MoE layers, forward and backward.

    logical_step(layers)     as capture leaves it: dispatch and combine are single nodes, parameters are whole
    parallel_step(layers)    after the default passes, 146 nodes a layer on fsdp 2 x ep 2; valid under every rule

Each layer is a norm, a token mixer in place of attention, a router and experts. Values are those that the operators
give; values of one type are one object, so all layers share the symbol of the number of rows that arrive. Time and
memory are linear in the number of layers: 1,000 nodes are 7 layers, 100,000 are 685.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import fx

from ep_fx.graph import (
    MESH_DIMS,
    Manifest,
    MeshSpec,
    NodeInfo,
    ParallelGraph,
    ParameterSpec,
    PassManager,
    Phase,
    RegionSpec,
    set_info,
)
from ep_fx.graph.fakes import Fakes
from ep_fx.graph.values import SymbolNames, dtype_text
from ep_fx.passes import default_pipeline
from ep_fx.sharding import make_layout
from ep_fx.verify.computation import computation

aten, ops = torch.ops.aten, torch.ops.ep_fx
_PROJECTIONS = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the mesh.

    Args:
        replicate, fsdp, ep: of the mesh.
        width, hidden, experts, top_k, vocabulary: of the model. Dense parameters whose first size the ranks do not
            divide are cut unevenly.
    """

    replicate: int = 1
    fsdp: int = 2
    ep: int = 2
    width: int = 64
    hidden: int = 128
    experts: int = 8
    top_k: int = 2
    vocabulary: int = 256

    @property
    def mesh(self) -> MeshSpec:
        """The mesh, its groups called by their dimensions."""
        sizes = {dim: getattr(self, dim) for dim in ("replicate", "fsdp", "ep")}
        live = [dim for dim in MESH_DIMS if sizes.get(dim, 1) > 1]
        some = [dims for n in range(1, len(live) + 1) for dims in combinations(live, n)]
        return MeshSpec(sizes, {dims: ",".join(dims) for dims in some}, "tokens" if "ep" in live else "")


def layers_for(nodes: int) -> int:
    """Layers of the `parallel_step` with about `nodes` nodes, on the default sizes."""
    return max(1, round((nodes - 26) / 146))


def parallel_step(layers: int, sizes: Sizes | None = None) -> ParallelGraph:
    """A sharded step with its exchanges, as `transform` makes it."""
    return PassManager(default_pipeline()).run(logical_step(layers, sizes))


def logical_step(layers: int, sizes: Sizes | None = None) -> ParallelGraph:
    """A step before any pass."""
    return _Writer(layers, sizes or Sizes()).graph()


class _Layer:
    """What backward needs of the forward of one layer: values by name."""

    def __init__(self, index: int) -> None:
        self.name = f"layers.{index}"
        self.values: dict[str, fx.Node] = {}

    def __getattr__(self, name: str) -> fx.Node:
        return self.values[name]


class _Writer:
    """Writes one graph, node by node."""

    def __init__(self, layers: int, sizes: Sizes) -> None:
        self._s, self._layers = sizes, [_Layer(i) for i in range(layers)]
        self._phase, self._fqn = Phase.FORWARD, ""
        self._fakes = Fakes("cpu")
        self._symbols = SymbolNames(())
        self._types: dict[str, Any] = {}
        self._known: dict[Any, Any] = {}
        specs = self._specs()
        regions = tuple(self._region(layer.name) for layer in self._layers)
        self._manifest = Manifest(
            sizes.mesh, tuple(specs), (), ("tokens",), ("tangent_0",), 1, (0,), regions=regions
        )
        self._graph = ParallelGraph(fx.Graph(), self._manifest)
        self._placeholders = {spec.name: self._parameter(spec) for spec in specs}
        self._tokens = self._placeholder("tokens", "i64[s0]")
        self._tangent = self._placeholder("tangent_0", f"f32[s0, {sizes.vocabulary}]")
        self._gradients: dict[str, fx.Node] = {}

    # -- facts -----------------------------------------------------------------------------------------------------
    def _specs(self) -> list[ParameterSpec]:
        s = self._s
        shapes: dict[str, tuple[int, ...]] = {"embedding": (s.vocabulary, s.width)}
        for layer in self._layers:
            shapes[f"{layer.name}.norm"] = (s.width,)
            shapes |= {f"{layer.name}.{p}": (s.width, s.width) for p in _PROJECTIONS}
            shapes[f"{layer.name}.router"] = (s.experts, s.width)
            shapes[f"{layer.name}.experts.w1"] = (s.experts, s.width, s.hidden)
            shapes[f"{layer.name}.experts.w2"] = (s.experts, s.hidden, s.width)
        shapes["head"] = (s.vocabulary, s.width)
        return [self._spec(name, shape) for name, shape in shapes.items()]

    def _spec(self, name: str, shape: tuple[int, ...]) -> ParameterSpec:
        sizes = {"fsdp": self._s.fsdp, "ep": self._s.ep}
        unit = name.rpartition(".")[0] or "root"
        layout = make_layout(shape, len(shape) == 3, sizes)
        return ParameterSpec(name, f"param_{name.replace('.', '_')}", torch.float32, True, layout, unit)

    def _region(self, layer: str) -> RegionSpec:
        name = f"{layer}.experts"
        return RegionSpec(name, self._s.experts, (f"{name}.w1", f"{name}.w2"), name, ep_size=self._s.ep)

    # -- nodes -----------------------------------------------------------------------------------------------------
    def _parameter(self, spec: ParameterSpec) -> fx.Node:
        shape = ", ".join(map(str, spec.layout.full_shape))
        return self._placeholder(spec.placeholder, f"{dtype_text(spec.dtype)}[{shape}]")

    def _placeholder(self, name: str, kind: str) -> fx.Node:
        node = self._graph.graph.placeholder(name)
        node.meta["val"] = self._types[kind] = self._fakes.value(kind)
        set_info(node, NodeInfo(Phase.BACKWARD if name == "tangent_0" else Phase.FORWARD))
        return node

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self._graph.call(target, *args, phase=self._phase, fqn=self._fqn, value=self._value(target, args))
        set_info(node, NodeInfo(self._phase, self._fqn, "synthetic.py:1"))
        return node

    def _value(self, target: Any, args: Sequence[Any]) -> Any:
        """The value of a call: computed once for each operator and types of arguments."""
        values = fx.node.map_arg(args, lambda node: node.meta["val"])
        key = (target, *(_key(value) for value in values))
        if key not in self._known:
            with self._fakes.mode:
                self._known[key] = self._shared(target(*values))
        return self._known[key]

    def _shared(self, value: Any) -> Any:
        """The one value of its type."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._shared, value))
        return self._types.setdefault(self._symbols.type(value, exact=True), value)

    def _items(self, node: fx.Node, *indices: int) -> list[fx.Node]:
        return [self._call(operator.getitem, node, index) for index in indices]

    def _t(self, node: fx.Node) -> fx.Node:
        return self._call(aten.t.default, node)

    def _mm(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self._call(aten.mm.default, a, b)

    def _p(self, layer: _Layer, name: str) -> fx.Node:
        return self._placeholders[f"{layer.name}.{name}"]

    # -- the step --------------------------------------------------------------------------------------------------
    def graph(self) -> ParallelGraph:
        """The finished graph; what it computes is recorded in its Manifest."""
        self._fqn = "embedding"
        x = self._call(aten.embedding.default, self._placeholders["embedding"], self._tokens)
        for layer in self._layers:
            x = self._experts_forward(layer, self._mixer_forward(layer, x))
        self._fqn = "head"
        logits = self._mm(x, self._t(self._placeholders["head"]))
        self._phase = Phase.BACKWARD
        self._gradients["head"] = self._mm(self._t(self._tangent), x)
        grad = self._mm(self._tangent, self._placeholders["head"])
        for layer in reversed(self._layers):
            grad = self._mixer_backward(layer, self._experts_backward(layer, grad))
        self._fqn = "embedding"
        args = (grad, self._tokens, self._s.vocabulary, -1, False)
        self._gradients["embedding"] = self._call(aten.embedding_dense_backward.default, *args)
        gradients = tuple(self._gradients[p.name] for p in self._manifest.parameters)
        set_info(self._graph.graph.output(((logits,), gradients, ())), NodeInfo(Phase.BACKWARD))
        self._graph.manifest = replace(self._manifest, computation=computation(self._graph))
        return self._graph

    def _mixer_forward(self, layer: _Layer, x: fx.Node) -> fx.Node:
        self._fqn = f"{layer.name}.norm"
        n = self._call(aten.mul.Tensor, x, self._p(layer, "norm"))
        self._fqn = f"{layer.name}.mixer"
        q, k, v = (self._mm(n, self._t(self._p(layer, name))) for name in "qkv")
        scores = self._call(aten._softmax.default, self._call(aten.mul.Tensor, q, k), -1, False)
        z = self._call(aten.mul.Tensor, scores, v)
        mixed = self._mm(z, self._t(self._p(layer, "o")))
        self._fqn = layer.name
        h = self._call(aten.add.Tensor, x, mixed)
        layer.values |= {"x": x, "n": n, "q": q, "k": k, "v": v, "scores": scores, "z": z, "h": h}
        return h

    def _experts_forward(self, layer: _Layer, h: fx.Node) -> fx.Node:
        call, s = self._call, self._s
        self._fqn = f"{layer.name}.router"
        chances = call(aten._softmax.default, self._mm(h, self._t(self._p(layer, "router"))), -1, False)
        weights, ids = self._items(call(aten.topk.default, chances, s.top_k), 0, 1)
        self._fqn = f"{layer.name}.experts"
        rows, counts, order = self._items(call(ops.permute.default, h, ids, s.experts), 0, 1, 2)
        dispatch = call(ops.dispatch.default, rows, counts, None, s.ep, f"{layer.name}.experts")
        routed, local, indices, splits = self._items(dispatch, 0, 2, 3, 4)
        w1, w2 = self._p(layer, "experts.w1"), self._p(layer, "experts.w2")
        up = call(ops.grouped_mm.default, routed, w1, local, None, False)
        act = call(aten.silu.default, up)
        down = call(ops.grouped_mm.default, act, w2, local, None, False)
        count = call(aten.sym_size.int, rows, 0)
        back = call(ops.combine.default, down, indices, splits, count, f"{layer.name}.experts")
        layer.values |= {"chances": chances, "weights": weights, "ids": ids, "order": order, "routed": routed}
        layer.values |= {"local": local, "indices": indices, "splits": splits, "up": up, "act": act, "back": back}
        layer.values["count"] = count
        together = call(ops.unpermute.default, back, order, weights)
        self._fqn = layer.name
        return call(aten.add.Tensor, h, together)

    def _experts_backward(self, layer: _Layer, grad: fx.Node) -> fx.Node:
        call, s, region = self._call, self._s, f"{layer.name}.experts"
        self._fqn = region
        undone = call(ops.unpermute_backward.default, grad, layer.back, layer.order, layer.weights)
        g_back, g_weights = self._items(undone, 0, 1)
        g_down = call(ops.combine_backward.default, g_back, layer.indices, layer.splits, region)
        g_act = self._product_backward(layer, g_down, layer.act, "experts.w2")
        g_up = call(aten.silu_backward.default, g_act, layer.up)
        g_routed = self._product_backward(layer, g_up, layer.routed, "experts.w1")
        args = (g_routed, None, layer.indices, layer.splits, layer.count, region)
        (g_rows,) = self._items(call(ops.dispatch_backward.default, *args), 0)
        tokens = call(aten.sym_size.int, layer.h, 0)
        g_h = call(ops.permute_backward.default, g_rows, layer.order, tokens, s.top_k)
        self._fqn = f"{layer.name}.router"
        zeros = call(aten.new_zeros.default, g_weights, [tokens, s.experts])
        g_chances = call(aten.scatter.src, zeros, -1, layer.ids, g_weights)
        g_logits = call(aten._softmax_backward_data.default, g_chances, layer.chances, -1, torch.float32)
        self._gradients[f"{layer.name}.router"] = self._mm(self._t(g_logits), layer.h)
        routed = self._mm(g_logits, self._p(layer, "router"))
        self._fqn = layer.name
        both = call(aten.add.Tensor, g_h, routed)
        return call(aten.add.Tensor, grad, both)

    def _product_backward(self, layer: _Layer, grad: fx.Node, x: fx.Node, name: str) -> fx.Node:
        args = (grad, x, self._p(layer, name), layer.local, False, False)
        g_x, g_weight = self._items(self._call(ops.grouped_mm_backward.default, *args), 0, 1)
        self._gradients[f"{layer.name}.{name}"] = g_weight
        return g_x

    def _mixer_backward(self, layer: _Layer, grad: fx.Node) -> fx.Node:
        call = self._call
        self._fqn = f"{layer.name}.mixer"
        g_z = self._linear_backward(layer, grad, layer.z, "o")
        g_scores, g_v = call(aten.mul.Tensor, g_z, layer.v), call(aten.mul.Tensor, g_z, layer.scores)
        g_p = call(aten._softmax_backward_data.default, g_scores, layer.scores, -1, torch.float32)
        g_q, g_k = call(aten.mul.Tensor, g_p, layer.k), call(aten.mul.Tensor, g_p, layer.q)
        parts = [self._linear_backward(layer, g, layer.n, p) for g, p in ((g_q, "q"), (g_k, "k"), (g_v, "v"))]
        g_n = call(aten.add.Tensor, call(aten.add.Tensor, parts[0], parts[1]), parts[2])
        self._fqn = f"{layer.name}.norm"
        scaled = call(aten.mul.Tensor, g_n, layer.x)
        self._gradients[f"{layer.name}.norm"] = call(aten.sum.dim_IntList, scaled, [0])
        g_x = call(aten.mul.Tensor, g_n, self._p(layer, "norm"))
        self._fqn = layer.name
        return call(aten.add.Tensor, grad, g_x)

    def _linear_backward(self, layer: _Layer, grad: fx.Node, x: fx.Node, name: str) -> fx.Node:
        self._gradients[f"{layer.name}.{name}"] = self._mm(self._t(grad), x)
        return self._mm(grad, self._p(layer, name))


def _key(value: Any) -> Any:
    """What tells arguments apart: values of one type are one object, numbers are themselves, the names of regions say
    nothing of types."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, str):
        return None
    return (type(value), value if isinstance(value, (int, float)) else id(value))
