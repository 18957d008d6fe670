"""An MoE layer with a shared expert on any mesh: each data rank (``replicate x fsdp x ep``) has its part of the tokens,
the ranks along ``tp`` have the same, and the full model on all of them says what must come out."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ep_fx.styles import Style
from tests.oracle import assert_all_gradients_close, oracle, relative_error
from tests.requirements.reg1_cases import Case, Run, everything, loss_of, make_model, run_tokens
from tests.styles.nestings import made, own_mesh

CASE = Case(num_experts=4, shared=True)


def place(mesh: DeviceMesh) -> tuple[int, int]:
    """Which data rank this is, and of how many."""
    index, count = 0, 1
    for dim in ("replicate", "fsdp", "ep"):
        if dim in (mesh.mesh_dim_names or ()):
            size = mesh.size(mesh.mesh_dim_names.index(dim))  # type: ignore[union-attr]
            index, count = index * size + mesh.get_local_rank(dim), count * size
    return index, count


def batch(index: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one data rank: ``[4, 16/count, 64]``."""
    tokens, targets = (whole.chunk(count, 1)[index].clone() for whole in everything())
    return tokens, targets


def run(rank: int, nesting: str, style: Style, sizes: dict[str, int], grouped: bool = False) -> tuple[int, int, Run]:
    """Data rank, number of data ranks, and what came out."""
    mesh = own_mesh(**sizes)
    index, count = place(mesh)
    case = Case(num_experts=CASE.num_experts, shared=True, grouped=grouped)
    return index, count, run_tokens(made(nesting, make_model(case), mesh, style), *batch(index, count))


def assert_equals_the_full_model(found: Sequence[tuple[int, int, Run]]) -> None:
    """Output, input gradient and every gradient of every rank."""
    count = found[0][1]
    data = [batch(index, count) for index in range(count)]
    want = oracle(lambda: make_model(CASE), [(x,) for x, _ in data], loss_of, [(t,) for _, t in data])
    for index, _, got in found:
        assert relative_error(got.output, want.outputs[index]) <= 1e-5
        assert_all_gradients_close(got.gradients, want.gradients)
    for index in range(count):  # ranks along tp: each has the whole gradient of its tokens
        same = [got.input_gradient for i, _, got in found if i == index]
        assert all(relative_error(one, same[0]) <= 1e-6 for one in same)
        tokens = data[index][0].clone().requires_grad_()
        loss_of(make_model(CASE)(tokens), data[index][1]).backward()
        assert tokens.grad is not None
        assert relative_error(same[0], tokens.grad) <= 1e-5
