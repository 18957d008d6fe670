"""Recognition of experts: one file per family; what none of them accepts is refused, never traced into nonsense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

from torch import nn

from ep_fx.capture.experts.base import Experts, Family, where
from ep_fx.capture.experts.cuts import find_cuts, full_name
from ep_fx.capture.experts.explicit import Explicit, register_experts, registration
from ep_fx.capture.experts.grouped import Grouped
from ep_fx.capture.experts.huggingface import HuggingFace
from ep_fx.capture.experts.module_list import ModuleLists, Stack, StackedExperts, Stacking, fold, stack_lists, unfold
from ep_fx.capture.experts.torchtitan import TorchTitan
from ep_fx.styles.forms import odd_parameters

_LISTS = ModuleLists()
FAMILIES: tuple[Family, ...] = (Explicit(), HuggingFace(), Grouped(), _LISTS, TorchTitan())
FORMS = tuple(family.form for family in FAMILIES)
"""The accepted forms in words, for messages."""
_DIMS: Sequence[str] = ("ep", "tp")
_TOP_K = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "experts_per_token")

__all__ = [
    "FORMS", "Experts", "Stack", "Stacking", "find_experts", "fold", "install", "register_experts", "stack_experts",
    "top_k_of", "unfold",
]


def stack_experts(model: nn.Module) -> Stacking:
    """Makes one module with stacked parameters of each list of experts in `model`; see `find_experts`."""
    return stack_lists(model, lambda module: registration(module) is not None)


def find_experts(
    model: nn.Module,
    plan: Mapping[str, Sequence[str]] | None,
    sizes: Mapping[str, int],
    reasons: Mapping[str, str] | None = None,
) -> list[Experts]:
    """The experts modules of `model`, in module order.

    Args:
        plan: module-path patterns and the mesh dimensions that what they match is split over, of ``ep`` and ``tp``;
            None: all that is recognised, over both; ``{}``: nothing.
        sizes: sizes of the mesh dimensions.
        reasons: why a list of experts was not recognised, by module path.

    Raises:
        ValueError: nothing recognised while it must be, a list of experts that is not recognised, a pattern that
            matches no experts, two styles for one module, or experts that ``tp`` cannot cut.
    """
    families = {path: family for path, module in model.named_modules() if (family := _family(module))}
    chosen: Mapping[str, Sequence[str]] = (
        dict.fromkeys(families, _DIMS) if plan is None else _planned(model, families, plan, reasons or {})
    )
    whole = [dim for dim in _DIMS if sizes.get(dim, 1) > 1]
    if whole and plan is None and not families and not reasons:
        dim = whole[0]
        raise ValueError(
            f"no MoE experts were recognised in {type(model).__name__}, but the mesh dimension {dim!r} has size "
            f"{sizes[dim]}; {_hint(model)}accepted forms: {list(FORMS)}; for a model without experts pass plan={{}}"
        )
    if whole and plan is None and reasons:
        raise ValueError(_not_recognised(list(reasons.values())))
    modules = dict(model.named_modules())
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for path, family in families.items():
        ep, tp = (sizes.get(dim, 1) if dim in chosen.get(path, ()) else 1 for dim in _DIMS)
        found.append(_describe(path, modules[path], family, ep, tp, first))
    return found


def _family(module: nn.Module) -> Family | None:
    if isinstance(module, StackedExperts):  # it has the arguments of grouped experts, but its parent sends the rows
        return _LISTS if _LISTS.accepts(module) else None
    return next((family for family in FAMILIES if family.accepts(module)), None)


def _describe(path: str, module: nn.Module, family: Family, ep: int, tp: int, first: Mapping[int, str]) -> Experts:
    """What is known of one module; parameters tied to another's go by the name that the model gives them first."""
    known = registration(module)
    if known is not None and (reason := known.refuses(module, ep)):
        raise ValueError(f"{path} ({type(module).__name__}, {where(module)}): {reason}")
    number = family.num_experts(module)
    lists = [name for name, inner in module.named_modules() if isinstance(inner, StackedExperts)]
    if known is not None and known.parameters is not None:
        own = _named(path, module, number, known.parameters)
    else:
        own = {
            name: p
            for name, p in module.named_parameters()
            if p.dim() > 0 and p.shape[0] == number and _is_of_experts(name, family, lists)
        }
    names = {full_name(path, name): first.get(id(p), full_name(path, name)) for name, p in own.items()}
    cuts = find_cuts(path, module, family, own, tp) if tp > 1 else {}
    cuts = {names[name]: cut for name, cut in cuts.items()}
    return Experts(path, module, family.name, number, tuple(names.values()), ep, tp, cuts)


def _named(path: str, module: nn.Module, number: int, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters `names` of `module`, which were given as the experts'."""
    found = dict(module.named_parameters())
    for name in names:
        if name not in found or not found[name].dim() or found[name].shape[0] % number:
            shape = tuple(found[name].shape) if name in found else "missing"
            raise ValueError(
                f"{path} ({type(module).__name__}): the parameter {name!r} given to register_experts is {shape}; "
                f"expected one whose dim 0 can be split over {number} experts"
            )
    return {name: found[name] for name in names}


def _is_of_experts(name: str, family: Family, lists: Sequence[str]) -> bool:
    """Whether the parameter `name` of a module of `family` is the experts', by where it stands."""
    if lists:  # what stands beside the lists counts experts by chance or for a router
        return any(not path or name.startswith(f"{path}.") for path in lists)
    return "." not in name or family.name in ("explicit", "torchtitan")


def _not_recognised(reasons: Sequence[str]) -> str:
    return (
        f"{'; '.join(reasons)}. Experts in a ModuleList are split over 'ep' only where it is proven what their parent "
        "computes; a few lines tell it: ep_fx.register_experts(cls, fn) for the parent's class, with fn(module, x) "
        f"calling ep_fx.moe(tokens, ids, weights, module.experts, num_experts). Accepted forms: {list(FORMS)}"
    )


def _planned(
    model: nn.Module, families: Mapping[str, Family], plan: Mapping[str, Sequence[str]], reasons: Mapping[str, str]
) -> dict[str, Sequence[str]]:
    chosen: dict[str, Sequence[str]] = {}
    for pattern, dims in plan.items():
        if failed := [reason for path, reason in reasons.items() if fnmatchcase(path, pattern)]:
            raise ValueError(f"plan: pattern {pattern!r}: {_not_recognised(failed)}")
        hits = {path for path in families if fnmatchcase(path, pattern)}
        if not hits:
            others = [path for path, _ in model.named_modules() if path and fnmatchcase(path, pattern)]
            what = f"matches {others[:3]}, which are not experts of a known form" if others else "matches no module"
            raise ValueError(
                f"plan: pattern {pattern!r} {what}; experts in this model: {list(families) or 'none'}; "
                f"accepted forms: {list(FORMS)}"
            )
        for path in sorted(hits):
            if tuple(chosen.setdefault(path, dims)) != tuple(dims):
                raise ValueError(
                    f"plan: {path!r} is to be split over {list(chosen[path])} and, by {pattern!r}, over {list(dims)}; "
                    "give every module one style"
                )
    return chosen


def _hint(model: nn.Module) -> str:
    """Names what looks like experts, so that the reader need not search."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "experts":
            found = f"{path} ({type(module).__name__}, {where(module)}) looks like experts but is in none of them"
            return f"{found}: {odd}; " if (odd := odd_parameters(module)) else f"{found}; "
    return ""


def top_k_of(model: nn.Module, experts: Experts) -> int | None:
    """The number of experts per token that the module, its parent or their config declares; None where none does."""
    parent = model.get_submodule(experts.path.rpartition(".")[0])
    module = experts.module
    owners = (module, parent, *(getattr(o, "config", None) for o in (parent, module)))
    for owner in (*owners, getattr(module, "token_dispatcher", None)):
        for name in _TOP_K:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


@contextmanager
def install(experts: Sequence[Experts]) -> Iterator[None]:
    """For the time of the context, the forward of all `experts` goes through the dialect."""
    with ExitStack() as stack:
        for family in FAMILIES:
            stack.enter_context(family.install([e for e in experts if e.family == family.name]))
        yield
