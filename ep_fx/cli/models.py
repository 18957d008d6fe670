"""A model by its name: ``module:callable``, or a folder with a HuggingFace ``config.json``. No weights, no network.

    package.models:build      build() -> model, (model, args) or (model, args, kwargs)
    path/to/folder            AutoModelForCausalLM of its config.json, on the meta device
"""

from __future__ import annotations

import difflib
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ep_fx.cli.failure import Code, FailedError


@dataclass
class Loaded:
    """A model and the inputs of its forward; of the inputs only types and sizes are read."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load(name: str, batch: int, seq: int) -> Loaded:
    """The model called `name`.

    Args:
        batch, seq: sizes of the token ids, i64 [batch, seq], that a model gets where `name` gives it no inputs.

    Raises:
        FailedError: there is no such model, or it cannot be made.
    """
    if Path(name).is_dir():
        return _from_folder(Path(name), batch, seq)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise FailedError(
            Code.INPUT, f"{name!r} is no model: expected module:callable, or a folder with a HuggingFace config.json"
        )
    return _from_callable(module, attribute, batch, seq)


def _from_folder(folder: Path, batch: int, seq: int) -> Loaded:
    if not (folder / "config.json").is_file():
        raise FailedError(Code.INPUT, f"{folder}: the folder has no config.json, so it names no HuggingFace model")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # the extra `hf`
    except ImportError as error:
        raise FailedError(
            Code.INPUT, f"{folder}: a HuggingFace model needs transformers: pip install 'ep_fx[hf]'"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (Exception, SystemExit) as error:
        raise FailedError(Code.INPUT, f"{folder}: {type(error).__name__}: {error}") from error
    return Loaded(model.train(), kwargs={"input_ids": _ids(batch, seq)})


def _from_callable(module: str, attribute: str, batch: int, seq: int) -> Loaded:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with python -m: modules of the current folder
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise FailedError(Code.INPUT, f"cannot import {module!r}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise FailedError(Code.INPUT, f"{module!r} has no {part!r}{hint}")
        found = getattr(found, part)
    try:
        made = found if isinstance(found, nn.Module) else found()
    except (Exception, SystemExit) as error:
        raise FailedError(Code.INPUT, f"{module}:{attribute}() raised {type(error).__name__}: {error}") from error
    return _loaded(made, f"{module}:{attribute}", batch, seq)


def _loaded(made: Any, name: str, batch: int, seq: int) -> Loaded:
    if isinstance(made, nn.Module):
        return Loaded(made, (_ids(batch, seq),))
    parts = made if isinstance(made, tuple) else (made,)
    args, kwargs = (*parts[1:], (), {})[:2]
    if not isinstance(parts[0], nn.Module) or not isinstance(args, tuple) or len(parts) > 3:
        got = ", ".join(type(part).__name__ for part in parts)
        raise FailedError(Code.INPUT, f"{name} gave ({got}); expected a model, (model, args) or (model, args, kwargs)")
    return Loaded(parts[0], args, dict(kwargs) if len(parts) == 3 else {})


def _ids(batch: int, seq: int) -> torch.Tensor:
    return torch.zeros(batch, seq, dtype=torch.long)
