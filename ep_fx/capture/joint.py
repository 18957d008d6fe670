"""One joint ATen graph, forward and backward, of an unmodified model.

    make_fx over   outputs = model(...);  tangents;  torch.autograd.grad(outputs, parameters, tangents)

Parameters have the shape a rank sees when they are unsharded (experts local over ``ep``), batch and sequence are
symbols, experts are ``dispatch ... combine`` regions. The tangents are marked by an op while the trace runs and become
placeholders afterwards, so that no probing run is needed.

Private torch API used here: ``make_fx``, ``FakeTensorMode``, ``ShapeEnv``, ``TracingContext``,
``enable_python_dispatcher`` (without it C++ composites read sizes and specialise silently), ``_reparametrize_module``,
``_disable_current_modes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ep_fx.capture.attention import WholeAttention
from ep_fx.capture.checkpointing import without_checkpoints
from ep_fx.capture.conversions import without_idle_conversions
from ep_fx.capture.counting import BoundedCounts
from ep_fx.capture.experts import FORMS, Experts, install
from ep_fx.capture.inputs import Guards, Inputs, Key, fake_inputs, relations_of
from ep_fx.capture.marker import TANGENT
from ep_fx.capture.names import Failure, module_names, number_backward, user_frame
from ep_fx.capture.outer_products import OuterProducts
from ep_fx.capture.outputs import drop_caches, without_caches
from ep_fx.capture.positions import counted_positions
from ep_fx.capture.products import GroupedProducts
from ep_fx.capture.untouched import refuse_rebound_buffers, untouched


@dataclass
class Trace:
    """The raw result of one trace.

    Args:
        module: graph and constants; placeholders are parameters, buffers, input tensors.
        out_spec, out_leaves: structure of the outputs; the value of each leaf that is not a tensor.
        tensor_leaves: which leaves are tensors, in the order of the graph's first outputs.
        differentiable: indices into the tensors that carry a gradient.
        input_grads: indices of the input tensors whose gradient is due.
    """

    module: fx.GraphModule
    guards: Guards
    out_spec: pytree.TreeSpec
    out_leaves: list[Any]
    tensor_leaves: list[int]
    differentiable: list[int]
    input_grads: list[int]


def trace_joint(
    model: nn.Module,
    shapes: dict[str, tuple[int, ...]],
    device: torch.device,
    experts: Sequence[Experts],
    inputs: Inputs,
    key: Key,
    *,
    gradients: bool,
    real_sizes: bool = False,
    whole_attention: bool = False,
) -> Trace:
    """Traces `model` for one input structure and one mode.

    Args:
        shapes: unsharded local shape of each parameter.
        device: device of the fake tensors.
        gradients: joint graph with backward; False: forward only.
        key: how to read the inputs' dimensions.
        real_sizes: the real sizes are the hints of free dimensions.
        whole_attention: torch's attention becomes one node of the dialect, where that covers it.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    mode.cache_enabled = False  # with symbolic sizes its keys cost more than the kernels that it saves
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    with mode:
        fake_parameters = {
            name: torch.empty(shapes[name], dtype=p.dtype, device=device).requires_grad_(p.requires_grad and gradients)
            for name, p in parameters.items()
        }
        fake_buffers = {
            name: torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device=device) for name, b in buffers.items()
        }
    tensors, symbols, static = fake_inputs(inputs, device, mode, key, real_sizes)
    step = _Step(model, list(fake_parameters), list(fake_buffers), inputs, gradients)
    flat = (*fake_parameters.values(), *fake_buffers.values(), *tensors)
    modes = _tracing(model, mode, gradients, whole_attention)
    with untouched(model), install(experts), without_caches(model), counted_positions(), modes:
        try:
            module = make_fx(step, record_stack_traces=True)(*flat)
        except GuardOnDataDependentSymNode as error:
            raise _refusal(model, step.failure, error) from error
    guards = Guards(inputs.paths, symbols, static, relations_of(env, symbols))
    return Trace(module, guards, *step.result())


@contextmanager
def outside_modes() -> Iterator[None]:
    """Takes off the dispatch modes that the caller is in, e.g. a log of what runs: a capture is no run."""
    with _disable_current_modes():
        yield


@contextmanager
def _tracing(model: nn.Module, mode: FakeTensorMode, gradients: bool, whole_attention: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(GroupedProducts())
        stack.enter_context(OuterProducts())
        if whole_attention:
            stack.enter_context(WholeAttention())
        stack.enter_context(BoundedCounts())
        stack.enter_context(without_checkpoints())
        stack.enter_context(without_idle_conversions(model))
        yield


class _Step:
    """The function that make_fx traces; keeps what it learns about the outputs."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[str],
        buffers: list[str],
        inputs: Inputs,
        gradients: bool,
    ) -> None:
        self.model, self.parameters, self.buffers = model, parameters, buffers
        self.inputs, self.gradients = inputs, gradients
        self.failure = Failure()

    def __call__(self, *flat: torch.Tensor) -> Any:
        ends = (len(self.parameters), len(self.parameters) + len(self.buffers))
        parameters, buffers, tensors = flat[: ends[0]], flat[ends[0] : ends[1]], flat[ends[1] :]
        given = dict(zip(self.buffers, buffers, strict=True))
        state = {**dict(zip(self.parameters, parameters, strict=True)), **given}
        with (
            stateless._reparametrize_module(self.model, state, tie_weights=True),
            module_names(self.model) as self.failure,
        ):
            args, kwargs = self.inputs.rebuild(tensors)
            output = self.model(*args, **kwargs)
            refuse_rebound_buffers(self.model, given)
        outputs = self._read(output)
        return (outputs, *self._gradients(outputs, parameters, tensors))

    def _read(self, output: Any) -> list[torch.Tensor]:
        output, _ = drop_caches(output)
        self.out_leaves, self.out_spec = pytree.tree_flatten(output)
        for leaf in self.out_leaves:
            if not isinstance(leaf, (torch.Tensor, int, float, str, bool, type(None))):
                raise TypeError(
                    f"{type(self.model).__name__} returns a {type(leaf).__name__}, which ep_fx cannot carry through a "
                    f"graph; return tensors, numbers, or containers that torch's pytree knows"
                )
        self.tensor_leaves = [i for i, leaf in enumerate(self.out_leaves) if isinstance(leaf, torch.Tensor)]
        outputs = [self.out_leaves[i] for i in self.tensor_leaves]
        self.out_leaves = [None if isinstance(x, torch.Tensor) else x for x in self.out_leaves]
        self.differentiable = [i for i, x in enumerate(outputs) if self.gradients and x.requires_grad]
        return outputs

    def _gradients(
        self, outputs: list[torch.Tensor], parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[Any]]:
        self.input_grads = [i for i, x in enumerate(tensors) if self.differentiable and x.requires_grad]
        if not self.differentiable:
            return [], []
        roots = [outputs[i] for i in self.differentiable]
        tangents = [TANGENT(root.detach()) for root in roots]
        trained = [p for p in parameters if p.requires_grad]
        wanted = [*trained, *(tensors[i] for i in self.input_grads)]
        number_backward(roots)
        found = torch.autograd.grad(roots, wanted, grad_outputs=tangents, allow_unused=True)
        filled = [g if g is not None else _zeros(w) for g, w in zip(found, wanted, strict=True)]
        return filled[: len(trained)], filled[len(trained) :]

    def result(self) -> tuple[pytree.TreeSpec, list[Any], list[int], list[int], list[int]]:
        """The fields of `Trace` after the guards."""
        return self.out_spec, self.out_leaves, self.tensor_leaves, self.differentiable, self.input_grads


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """The gradient of what was not used: all ranks reduce alike. Reads no value of `like`, only its size."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _refusal(model: nn.Module, failure: Failure, error: Exception) -> ValueError:
    """What is said about a forward whose control flow depends on the values of tensors."""
    return ValueError(
        f"{failure.path or type(model).__name__} ({user_frame(error) or 'source unknown'}): forward branches or loops "
        f"on the values of a tensor, which a graph cannot carry: {str(error).splitlines()[0]}. If these are experts, "
        f"write them in one of the accepted forms: {'; '.join(FORMS)}"
    )
