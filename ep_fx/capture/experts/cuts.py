"""Where `tp` cuts the parameters of experts: along their hidden features, which are known by name."""
from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ep_fx.capture.experts.base import Cut, Family, where


def full_name(path: str, name: str) -> str:
    """Name in the model of the parameter `name` of the module at `path`."""
    return f"{path}.{name}" if path else name


def find_cuts(
    path: str, module: nn.Module, family: Family, parameters: Mapping[str, nn.Parameter], tp: int
) -> dict[str, Cut]:
    """How ``tp`` cuts each of the parameters that it cuts, by their names in the model.

    Args:
        parameters: those of the experts, by their names in `module`.
        tp: number of ranks.

    Raises:
        ValueError: a parameter of which nothing is known, or whose hidden features cannot be divided.
    """
    cuts: dict[str, Cut] = {}
    for name, parameter in parameters.items():
        full = full_name(path, name)
        try:
            cut = family.cut(module, name)
        except KeyError as error:
            raise ValueError(
                f"parameter {full!r} of {type(module).__name__} ({where(module)}): which of its dimensions counts "
                "hidden features, for 'tp' to cut, is not known; accepted: w1 and w3 [E, hidden, dim], w2 "
                "[E, dim, hidden] (gate_proj, up_proj, down_proj), and transformers' experts; "
                f"plan={{{path!r}: ep_fx.ExpertParallel()}} leaves these experts whole on all ranks along 'tp'"
            ) from error
        if cut is not None:
            _check_hidden(full, tuple(parameter.shape), cut, tp)
            cuts[full] = cut
    return cuts


def _check_hidden(name: str, shape: tuple[int, ...], cut: Cut, tp: int) -> None:
    parts = cut.blocks * cut.each
    hidden = shape[cut.dim] // parts if cut.dim < len(shape) else 0
    if not hidden or shape[cut.dim] % parts or hidden % tp:
        raise ValueError(
            f"parameter {name!r} of shape {list(shape)}: its {hidden} hidden features (dim {cut.dim}) are not "
            f"divisible by the mesh dimension 'tp' of size {tp}; accepted tp sizes: "
            f"{[d for d in range(1, hidden + 1) if hidden % d == 0]}"
        )
