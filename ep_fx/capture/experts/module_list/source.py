"""The statements around a loop over experts, in the source of the method that holds them.

    for e in range(8): ...          a *site*: the innermost block of statements, outside all loops, that holds every
    y[order] = torch.cat(outs)      use of the experts; a *window* of its statements is one call of the dialect

A method is compiled anew from its source, under its own file and line numbers, twice: with a look at the local
variables between the statements of a site (`observed`), and with a window replaced by a call (`replaced`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ep_fx.capture.experts.module_list.ambient import changed_around, lost_inside

LOOK = "__ep_fx_look__"
CALL = "__ep_fx_call__"
SHAPES = "__ep_fx_shapes__"
RESULT = "__ep_fx_result__"
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_BLOCKS = ("body", "orelse", "finalbody")


class SourceError(ValueError):
    """Why the source of a method cannot be used."""


@dataclass
class Site:
    """A block of statements that uses the experts.

    Args:
        number: among the sites of the method.
        block: the statements, in place.
        first, last: the statements that use the experts lie between these two, inclusive.
    """

    number: int
    block: list[ast.stmt]
    first: int
    last: int


class Method:
    """A method that uses ``self.<experts>``, whatever it calls its first argument.

    Args:
        cls: the class that defines it.
        name: of the method.
        experts: name of the attribute.

    Raises:
        SourceError: there is no source, or it has a form that cannot be compiled again.
    """

    def __init__(self, cls: type, name: str, experts: str) -> None:
        self.name, self.experts = name, experts
        self.function: Any = inspect.unwrap(cls.__dict__[name])
        self.line = self.function.__code__.co_firstlineno
        self.file = self.function.__code__.co_filename
        tree = self.tree()
        own = _definition(tree).args
        first = next(iter([*own.posonlyargs, *own.args]), None)
        self.self_name = "" if first is None else first.arg
        self.sites = self._sites(tree)

    def tree(self) -> ast.Module:
        """The method's own source as a fresh tree, with the line numbers of its file; results are named."""
        try:
            lines, start = inspect.getsourcelines(self.function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError) as error:
            raise SourceError(f"the source of {self.function.__qualname__} is not to be had: {error}") from error
        ast.increment_lineno(tree, start - 1)
        if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
            raise SourceError(f"{self.function.__qualname__} is not a plain method")
        _name_results(tree.body[0])
        return tree

    @property
    def where(self) -> str:
        """``file:line`` of the first use of the experts."""
        line = self.sites[0].block[self.sites[0].first].lineno if self.sites else self.line
        return f"{self.file}:{line}"

    def _sites(self, tree: ast.Module) -> list[Site]:
        sites: list[Site] = []
        for block in _blocks(_definition(tree)):
            tainted: set[str] = set()
            uses = [i for i, statement in enumerate(block) if self._uses(statement, tainted)]
            if uses and not any(_holds_site(block[i], lambda s: self._uses(s, set())) for i in uses):
                sites.append(Site(len(sites), block, uses[0], uses[-1]))
        return sites

    def _uses(self, statement: ast.stmt, tainted: set[str]) -> bool:
        """Whether `statement` touches the experts, other than to count them; `tainted` names stand for them too."""
        calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and n.args]
        counted = {id(n.args[0]) for n in calls if isinstance(n.func, ast.Name) and n.func.id == "len"}
        hit = any(
            (isinstance(n, ast.Attribute) and n.attr == self.experts and self._is_self(n.value))
            or (isinstance(n, ast.Name) and n.id in tainted and isinstance(n.ctx, ast.Load))
            for n in ast.walk(statement)
            if id(n) not in counted
        )
        if hit and isinstance(statement, ast.Assign) and not isinstance(statement.value, ast.Call):
            tainted |= {t.id for t in statement.targets if isinstance(t, ast.Name)}
        return hit

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.self_name

    def observed(self, look: Callable[[int, int, dict[str, Any]], None]) -> types.FunctionType:
        """The method, calling ``look(site, index, locals)`` before each statement of a site, after the last, and
        at the start of the method with index -1."""
        tree = self.tree()
        for site in self._sites(tree):
            looks = [_statement(f"{LOOK}({site.number}, {i}, locals())", like) for i, like in enumerate(_ends(site))]
            mixed: list[ast.stmt] = []
            for before, statement in zip(looks, site.block, strict=False):
                mixed += [before, statement]
            if not isinstance(site.block[-1], (ast.Return, ast.Raise)):
                mixed.append(looks[-1])
            site.block[:] = mixed
            body = _definition(tree).body
            body.insert(0, _statement(f"{LOOK}({site.number}, -1, locals())", body[0]))
        return self._compiled(tree, {LOOK: look})

    def replaced(self, windows: Sequence[tuple[int, int, int, str]]) -> types.FunctionType:
        """The method with windows replaced: ``(site, first statement, end, statement in their place)``."""
        tree = self.tree()
        sites = self._sites(tree)
        for number, start, end, text in windows:
            block = sites[number].block
            block[start:end] = [_statement(text, block[start])]
        definition = _definition(tree)
        names = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)]
        shapes = ", ".join(f"{n!r}: getattr({n}, 'shape', None)" for n in names)
        definition.body.insert(0, _statement(f"{SHAPES} = {{{shapes}}}", definition.body[0]))
        return self._compiled(tree, {})

    def _compiled(self, tree: ast.Module, given: dict[str, Any]) -> types.FunctionType:
        """The function of `tree` in its own module's globals, with its closure and `given` names around it."""
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
        try:
            outer = {**{name: cell.cell_contents for name, cell in cells.items()}, **given}
        except ValueError as error:
            raise SourceError(f"{self.function.__qualname__} reads a variable that is not set yet") from error
        definition = _definition(tree)
        factory = ast.parse(f"def __ep_fx_factory__({', '.join(outer)}):\n    return {definition.name}").body[0]
        assert isinstance(factory, ast.FunctionDef)
        factory.body.insert(0, definition)
        tree.body[0] = ast.fix_missing_locations(factory)
        space: dict[str, Any] = {}
        exec(compile(tree, self.file, "exec"), self.function.__globals__, space)
        made: types.FunctionType = space["__ep_fx_factory__"](**outer)
        return made

    def read_after(self, site: int, end: int) -> set[str]:
        """Names that may be read behind statement `end` of a site."""
        tree = self.tree()
        block = self._sites(tree)[site].block
        later = [*block[end:], *_behind(_definition(tree), block)]
        names = [n for statement in later for n in ast.walk(statement) if isinstance(n, ast.Name)]
        return {n.id for n in names if isinstance(n.ctx, ast.Load)}

    def window(self, site: int, start: int, end: int) -> Window:
        """What the statements ``start .. end - 1`` of a site do, as far as their text tells."""
        nodes = [n for s in self.sites[site].block[start:end] for n in ast.walk(s)]
        names = [n for n in nodes if isinstance(n, ast.Name)]
        stored = {n.id for n in names if not isinstance(n.ctx, ast.Load)}
        attributes = [n for n in nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)]
        jumps = any(isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)) for n in nodes)
        return Window(stored, {n.id for n in names} - stored, bool(attributes) or jumps)

    def unseen(self, site: int, start: int, end: int) -> str | None:
        """What about these statements no trial can judge, in words, see `ambient`."""
        tree = self.tree()
        block = self._sites(tree)[site].block
        names = {**self.function.__globals__, **inspect.getclosurevars(self.function).nonlocals}
        around = changed_around(_definition(tree), lambda node: any(b is block for b in _blocks(node)), names)
        return around or lost_inside(block[start:end], names)

    def unseen_sites(self) -> str | None:
        """The same for the uses of the experts, the first reason there is."""
        reasons = (self.unseen(site.number, site.first, site.last + 1) for site in self.sites)
        return next((reason for reason in reasons if reason), None)


@dataclass(frozen=True)
class Window:
    """Names that its statements bind, names they only read, and whether it does more than bind names."""

    stored: set[str]
    read: set[str]
    more: bool


def methods_of(cls: type, experts: str) -> list[Method]:
    """The methods of `cls` that use its list of experts other than to count them, as the class would call them."""
    found: list[Method] = []
    for name in dict.fromkeys(n for base in cls.__mro__ for n in base.__dict__):
        owner = next(base for base in cls.__mro__ if name in base.__dict__)
        function = owner.__dict__[name]
        if owner.__module__.startswith("torch.nn.modules") or name == "__init__" or not callable(function):
            continue
        if isinstance(function, (staticmethod, classmethod)):
            continue
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and experts in code.co_names and (method := Method(owner, name, experts)).sites:
            found.append(method)
    return found


def _definition(tree: ast.Module) -> ast.FunctionDef:
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every block of statements under `node` that stands in no loop and in no function of its own."""
    for name in _BLOCKS:
        block = getattr(node, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
            for statement in block:
                if not isinstance(statement, (*_LOOPS, ast.FunctionDef, ast.ClassDef)):
                    yield from _blocks(statement)
    for handler in getattr(node, "handlers", ()):
        yield from _blocks(handler)


def _holds_site(statement: ast.stmt, uses: Callable[[ast.stmt], bool]) -> bool:
    """Whether the use lies in a block inside `statement`, which is then the better place to look at."""
    if isinstance(statement, (*_LOOPS, ast.FunctionDef)):
        return False
    return any(uses(inner) for block in _blocks(statement) for inner in block)


def _behind(node: ast.AST, block: list[ast.stmt]) -> list[ast.AST]:
    """What may run after `block`, which stands under `node` in no loop."""
    for name in _BLOCKS:
        inner = getattr(node, name, None)
        if not isinstance(inner, list):
            continue
        if inner is block:
            return [*node.handlers, *node.orelse, *node.finalbody] if isinstance(node, ast.Try) else []
        for index, statement in enumerate(inner):
            if any(found is block for found in _blocks(statement)):
                after = _behind(statement, block)
                rest = [*node.handlers, *node.orelse, *node.finalbody] if isinstance(node, ast.Try) else []
                return [*after, *inner[index + 1 :], *rest]
    for handler in getattr(node, "handlers", ()):
        if any(found is block for found in _blocks(handler)):
            return [*_behind(handler, block), *getattr(node, "finalbody", ())]
    return []


def _statement(text: str, like: ast.stmt) -> ast.stmt:
    made = ast.parse(text).body[0]
    for node in ast.walk(made):
        ast.copy_location(node, like)
    return made


def _ends(site: Site) -> list[ast.stmt]:
    return [*site.block, site.block[-1]]


def _name_results(definition: ast.FunctionDef) -> None:
    """``return expression`` becomes two statements, so that what is returned can be looked at."""
    for block in _blocks(definition):
        last = block[-1]
        if isinstance(last, ast.Return) and not isinstance(last.value, (ast.Name, ast.Tuple, type(None))):
            named = ast.Assign([ast.Name(RESULT, ast.Store())], last.value)
            back = ast.Return(ast.Name(RESULT, ast.Load()))
            block[-1:] = [ast.copy_location(named, last), ast.copy_location(back, last)]
            for statement in block[-2:]:
                ast.fix_missing_locations(statement)
