"""A function call on its way to a rank: by name, with what the rank needs to import that name.

The rank looks for modules where the caller does (its ``sys.path`` at the time of the call), and loads a function's
module from its file where no path leads to it, as under pytest's ``--import-mode=importlib``.
"""
from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """`fn` and `args` as bytes.

    Raises:
        TypeError: `fn` cannot be found by its name on another process, or an argument cannot be pickled.
    """
    __tracebackhide__ = True
    bodies = [getattr(value, "__func__", value) for value in (fn, *args)]
    functions = [body for body in bodies if isinstance(body, FunctionType)]
    for body in functions:
        if "<" in body.__qualname__:
            place = f"{body.__code__.co_filename}:{body.__code__.co_firstlineno}"
            raise TypeError(
                f"{body.__qualname__} ({place}) cannot run on ranks: "
                "they find a function by its name, so it must stand at the top of a module; pass what it takes from "
                "around it as arguments"
            )
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(f"{name} and its arguments {_types(args)} cannot be sent to ranks: {error}") from error
    return pickle.dumps((sys.path, {body.__module__: body.__code__.co_filename for body in functions}, call))


def unpack(task: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and the arguments, on the rank."""
    path, modules, call = pickle.loads(task)
    sys.path[:] = path
    for module, file in modules.items():
        if module not in sys.modules:
            _load(module, file)
    fn, args = pickle.loads(call)
    return fn, args


def _load(module: str, file: str) -> None:
    """Imports `module`, from its `file` where its name does not lead there."""
    importlib.invalidate_caches()
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module was found, and lacks something else
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise
        sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[module]
            raise


def _types(args: tuple[Any, ...]) -> str:
    return f"({', '.join(type(arg).__name__ for arg in args)})"
