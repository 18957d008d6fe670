"""What becomes of the parts of a model's output that are not tensors.

A transformers model with the default ``use_cache`` returns a cache for generation beside its logits. A training step
has no use for it, and keeping it would hold a copy of every key and value alive: for the time of a capture such models
are told to make none, and one that is made all the same is returned as None. A call that asks for a cache is refused.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

_CACHE_KEYS = ("past_key_values", "cache_params", "mems")


def _is_cache(value: Any) -> bool:
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in type(value).__mro__)


def _configs(model: nn.Module) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Until the end, the configs in `model` say ``use_cache=False``."""
    configs: dict[int, Any] = {id(config): config for config in _configs(model)}
    switched = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in switched:
        config.use_cache = False
    try:
        yield
    finally:
        for config in switched:
            config.use_cache = True


def drop_caches(output: Any) -> tuple[Any, list[str]]:
    """`output` with each generation cache replaced by None, and the class names of what was replaced.

    The class of `output` is kept; a transformers ``ModelOutput`` loses the entry, as for ``use_cache=False``.
    """
    leaves, spec = pytree.tree_flatten(output, is_leaf=_is_cache)
    dropped = [type(leaf).__name__ for leaf in leaves if _is_cache(leaf)]
    if not dropped:
        return output, []
    rebuilt = pytree.tree_unflatten([None if _is_cache(leaf) else leaf for leaf in leaves], spec)
    if isinstance(rebuilt, dict) and hasattr(rebuilt, "to_tuple"):
        rebuilt = type(rebuilt)(**{name: value for name, value in rebuilt.items() if value is not None})
    return rebuilt, dropped


def refuse_caches(kwargs: dict[str, Any]) -> None:
    """Refuses a call that asks for a generation cache.

    Raises:
        ValueError: ``use_cache=True`` or a cache among the arguments.
    """
    if kwargs.get("use_cache"):
        raise ValueError("use_cache=True: a transformed module trains and evaluates; it returns no generation cache, "
                         "leave use_cache out or pass False")
    for name, value in kwargs.items():
        if _is_cache(value) or (name in _CACHE_KEYS and value is not None):
            raise ValueError(f"{name}: a transformed module takes no generation cache; leave it out")
