"""The emitted forward as one flat graph of ATen, torch_npu and functional collectives, given to a back end of compile.

Not through dynamo: it would read the Python of the kernels and of the module. `make_fx` runs the emitted graph on fake
npu tensors instead, and what communicates or shares memory in the dialect is opened up by `_OPENED`, as functional
graphs have no operators that alias. Memory of gathered parameters is not freed early in such a graph.

Private torch API used here: ``torch._guards.tracing``, ``lookup_backend`` of ``torch._dynamo``.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

import ep_fx
from ep_fx.graph.split import split
from ep_fx.ops.library import KERNELS
from tests.models.hf import hf_ids, tiny_hf
from tests.npu_sim.device import npu, npu_mesh

dialect = torch.ops.ep_fx
OPTIONS: dict[str, dict[str, Any]] = {"aot_eager": {}, "npugraph_ex": {"options": {"force_eager": True}}}


def _send_rows(x: Tensor, splits: Sequence[int]) -> Tensor:
    return x.narrow(0, 0, sum(splits)).clone()


def _pad_rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.cat([x, x.new_zeros((shape[0] - x.shape[0], *x.shape[1:]))])


_OPENED: dict[Any, Callable[..., Any]] = {
    dialect.send_rows.default: _send_rows,
    dialect.pad_rows.default: _pad_rows,
    **{
        getattr(dialect, name).default: KERNELS[name]
        for name in ("pad_shard", "unshard", "unshard_wait", "unpad_shard", "assemble")
    },
}


def compare(rank: int, backend: str, dim: str) -> tuple[list[str], float]:
    """Compiles the forward of a tiny Mixtral on two ranks and runs it.

    Returns:
        operators of torch_npu in the flat graph, and the largest difference of any output or saved value.
    """
    device = npu(rank)
    module = ep_fx.transform(tiny_hf("mixtral"), npu_mesh(**{dim: 2}))
    ids = hf_ids(rank, 2, 12).to(device)
    module(input_ids=ids)
    graph, buffers = module.lowered, dict(module.named_buffers())
    local = [p.to_local().detach() for p in module.parameters() if isinstance(p, DTensor)]
    values = [*local, *(buffers[b.name] for b in graph.manifest.buffers), ids]
    with torch.no_grad():
        wanted = tree_leaves(module.programs[0].forward(list(values)))
        flat = _flat(graph, values)
        got = _compiled(flat, values, backend)(*values)
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if isinstance(b, Tensor) and b.numel()]
    names = {str(n.target) for n in flat.graph.nodes if str(n.target).startswith("npu.")}
    return sorted(names), max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def _flat(graph: Any, values: list[Tensor]) -> fx.GraphModule:
    half = split(graph).forward
    for node in half.find_nodes(op="call_function", target=dialect.reshard.default):
        half.erase_node(node)
    inner = fx.GraphModule({name: value.to("npu") for name, value in graph.constants.items()}, half)
    trace = make_fx(
        lambda *given: tuple(tree_leaves(inner(*given))),
        decomposition_table=_OPENED, tracing_mode="symbolic", _allow_non_fake_inputs=True,
    )
    flat: fx.GraphModule = trace(*values)
    for node in flat.graph.nodes:
        node.meta.clear()  # its symbols are of a trace that has ended
    return flat


def _compiled(flat: fx.GraphModule, values: list[Tensor], backend: str) -> Callable[..., list[Any]]:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(value, static_shapes=True) for value in values]
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with scalars, torch._guards.tracing(torch._guards.TracingContext(mode)):
        return lookup_backend(backend)(flat, fakes, **OPTIONS[backend])
