"""Where operators of torch_npu, and operators without autograd, may be called: read off the source."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ep_fx

PACKAGE = Path(ep_fx.__file__).parent
KERNELS = "targets/npu/kernels"
IMPORT = "targets/npu/machine.py"
"""Imports torch_npu, and names no operator."""
COLLECTIVES = frozenset({
    "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "reduce_scatter_tensor",
})
NO_GRADIENT = {
    ("exchange.py", "dispatch"): "numbers of rows",
    ("gradients.py", "_Average._average"): "gradients, in hooks",
}
"""Functions of the styles that may communicate outside of an autograd function, and what they send."""


def _sources(folder: str = "") -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def npu_uses(tree: ast.AST) -> list[int]:
    """Lines that name the namespace ``torch.ops.npu`` or the module ``torch_npu``."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="ops"), attr="npu"):
                found.append(node.lineno)
            case ast.Name(id="torch_npu") | ast.Import(names=[ast.alias(name="torch_npu"), *_]):
                found.append(node.lineno)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "torch_npu":
                found.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value="torch_npu"), *_]):
                found.append(node.lineno)
    return found


def test_operators_of_torch_npu_are_reached_through_kernels_only() -> None:
    places = {path: npu_uses(tree) for path, tree in _sources() if not path.startswith("testing/")}
    used = {path for path, lines in places.items() if lines}
    assert used == {f"{KERNELS}/registry.py", IMPORT}, {path: lines for path, lines in places.items() if lines}


@pytest.mark.parametrize("text", [
    "torch.ops.npu.npu_swiglu(x)", "N = torch.ops.npu", "import torch_npu", "from torch_npu import npu_swiglu",
    "torch_npu.npu_swiglu(x)", "importlib.import_module('torch_npu')",
])  # fmt: skip
def test_every_way_to_name_them_is_seen(text: str) -> None:
    assert npu_uses(ast.parse(text))


def test_every_kernel_calls_the_operator_of_its_name() -> None:
    """One operator each: what `checked` looks at is all that a kernel gives to the device."""
    for path, tree in _sources(KERNELS):
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            marks = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
            called = [
                node.args[0].value
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "call"
                and node.args and isinstance(node.args[0], ast.Constant)
            ]  # fmt: skip
            if any(isinstance(mark, ast.Name) and mark.id == "kernel" for mark in marks):
                assert called == [function.name], (path, function.name)
            elif function.name not in ("call", "reached"):
                assert not called, (path, function.name)


# -- styles ------------------------------------------------------------------------------------------------------------
def _functions(tree: ast.Module) -> tuple[dict[str, ast.FunctionDef], set[str]]:
    """Functions of a module, and the names of those that are called only from an autograd function: what they give
    goes to autograd with a formula."""
    top = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    inside = [c for c in classes if any(ast.unparse(base).endswith("autograd.Function") for base in c.bases)]
    for other in (c for c in classes if c not in inside):
        top |= {f"{other.name}.{node.name}": node for node in other.body if isinstance(node, ast.FunctionDef)}
    callers: dict[str, set[str]] = {name: set() for name in top}
    for name, node in [*top.items(), *((f"<{node.name}>", node) for node in inside)]:
        for called in _called(node):
            if called in callers and called != name:
                callers[called].add(name)
    covered: set[str] = set()
    while True:
        more = {
            name
            for name, by in callers.items()
            if name not in covered and by and all(caller.startswith("<") or caller in covered for caller in by)
        }
        if not more:
            return top, covered
        covered |= more


def _called(node: ast.AST) -> Iterator[str]:
    for found in ast.walk(node):
        if isinstance(found, ast.Call):
            yield found.func.attr if isinstance(found.func, ast.Attribute) else getattr(found.func, "id", "")


def uncovered(tree: ast.Module) -> dict[str, list[str]]:
    """Functions that communicate where autograd does not know the way back: it would lose gradients without a word."""
    top, covered = _functions(tree)
    raw = {name: sorted(COLLECTIVES & set(_called(node))) for name, node in top.items() if name not in covered}
    return {name: calls for name, calls in raw.items() if calls}


def test_styles_communicate_inside_autograd_functions_only() -> None:
    found = {(Path(path).name, name) for path, tree in _sources("styles") for name in uncovered(tree)}
    assert found == set(NO_GRADIENT)


def test_the_scan_sees_a_collective_outside() -> None:
    outside = "def send(x):\n    dist.all_to_all_single(y, x)\n    return y\n"
    inside = (
        "class Send(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return send(x)\n"
    )
    assert uncovered(ast.parse(outside)) == {"send": ["all_to_all_single"]}
    assert uncovered(ast.parse(outside + inside)) == {}
    assert uncovered(ast.parse("class Hook:\n    def run(self, x):\n        dist.all_reduce(x)\n")) == {
        "Hook.run": ["all_reduce"]
    }
    assert uncovered(ast.parse(outside + inside + "def other(x):\n    return send(x)\n")) == {
        "send": ["all_to_all_single"]
    }
