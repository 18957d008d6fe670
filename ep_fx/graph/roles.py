"""What a node does, recomputed from its target: never stored, so no pass can leave it stale."""
from __future__ import annotations

import operator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import fx


class Role(Enum):
    """The part a node plays; the value is the schema name of its target."""

    PERMUTE = "ep_fx::permute"
    PERMUTE_BACKWARD = "ep_fx::permute_backward"
    UNPERMUTE = "ep_fx::unpermute"
    UNPERMUTE_BACKWARD = "ep_fx::unpermute_backward"
    DISPATCH = "ep_fx::dispatch"
    DISPATCH_BACKWARD = "ep_fx::dispatch_backward"
    COMBINE = "ep_fx::combine"
    COMBINE_BACKWARD = "ep_fx::combine_backward"
    CONTEXT = "dispatch_context"
    EXCHANGE = "_c10d_functional::all_to_all_single"
    WAIT = "_c10d_functional::wait_tensor"
    REGROUP = "ep_fx::regroup"
    UNGROUP = "ep_fx::ungroup"
    SEND_ROWS = "ep_fx::send_rows"
    PAD_ROWS = "ep_fx::pad_rows"
    GROUPED_MM = "ep_fx::grouped_mm"
    GROUPED_MM_BACKWARD = "ep_fx::grouped_mm_backward"
    PAD_SHARD = "ep_fx::pad_shard"
    UNSHARD = "ep_fx::unshard"
    UNSHARD_WAIT = "ep_fx::unshard_wait"
    ASSEMBLE = "ep_fx::assemble"
    RESHARD = "ep_fx::reshard"
    DISASSEMBLE = "ep_fx::disassemble"
    REDUCE_GRAD = "ep_fx::reduce_grad"
    ALL_REDUCE_GRAD = "ep_fx::all_reduce_grad"
    REDUCE_GRAD_WAIT = "ep_fx::reduce_grad_wait"
    SCALE_GRAD = "ep_fx::scale_grad"
    UNPAD_SHARD = "ep_fx::unpad_shard"
    GETITEM = "getitem"
    PLACEHOLDER = "placeholder"
    OUTPUT = "output"
    OTHER = "other"

    __hash__ = object.__hash__
    """Members are themselves: the hash of a name costs a call for every look-up."""


_BY_NAME = {role.value: role for role in Role}
COLLECTIVES = frozenset({Role.EXCHANGE, Role.UNSHARD, Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD})
WAIT_OF = {
    Role.EXCHANGE: Role.WAIT,
    Role.UNSHARD: Role.UNSHARD_WAIT,
    Role.REDUCE_GRAD: Role.REDUCE_GRAD_WAIT,
    Role.ALL_REDUCE_GRAD: Role.REDUCE_GRAD_WAIT,
}


def target_name(node: fx.Node) -> str:
    """``"namespace::op"`` of an operator, the name of a function, or the kind of a node without a target."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name
    if node.target is operator.getitem:
        return "getitem"
    return getattr(node.target, "__name__", str(node.target))


class Kind(NamedTuple):
    """What follows from a target."""

    role: Role
    is_collective: bool
    is_mutation: bool
    target: Any


_KINDS: dict[int, Kind] = {}
"""Kinds of operators met so far, by identity, since the hash of an operator is a call. The operator is kept, so that no
other object can take its place in memory."""


def kind_of(node: fx.Node) -> Kind:
    """What follows from the target of `node`."""
    known = _KINDS.get(id(node.target))
    if known is not None:
        return known
    name, target = target_name(node), node.target
    role = _BY_NAME.get(name, Role.OTHER)
    collective = name.startswith("_c10d_functional") and not name.endswith("wait_tensor")
    mutates = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    kind = Kind(role, role in COLLECTIVES or collective, mutates, target)
    if isinstance(target, torch._ops.OpOverload) or target is operator.getitem:
        _KINDS[id(target)] = kind
    return kind


def role_of(node: fx.Node) -> Role:
    """The role of `node`, from its target alone."""
    return kind_of(node).role


def is_collective(node: fx.Node) -> bool:
    """Whether `node` starts a collective, of this dialect or of torch's."""
    return kind_of(node).is_collective


def is_mutation(node: fx.Node) -> bool:
    """Whether `node` writes one of its arguments in place."""
    return kind_of(node).is_mutation


def is_effect(node: fx.Node) -> bool:
    """Whether `node` must survive clean-up though nobody reads it: collectives, in-place writes, boundaries."""
    if node.op in ("placeholder", "output"):
        return True
    asserts = target_name(node).startswith("aten::_assert_async")
    return is_collective(node) or is_mutation(node) or asserts or role_of(node) is Role.CONTEXT
