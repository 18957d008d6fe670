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
    TP_SHARE = "ep_fx::tp_share"
    TP_SUM = "ep_fx::tp_sum"
    ALL_REDUCE = "_c10d_functional::all_reduce"
    ADD_BIAS = "ep_fx::add_bias"
    ADD_BIAS_BACKWARD = "ep_fx::add_bias_backward"
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
COLLECTIVES = frozenset({Role.EXCHANGE, Role.ALL_REDUCE, Role.UNSHARD, Role.REDUCE_GRAD, Role.ALL_REDUCE_GRAD})
WAIT_OF = {
    Role.EXCHANGE: Role.WAIT,
    Role.ALL_REDUCE: Role.WAIT,
    Role.UNSHARD: Role.UNSHARD_WAIT,
    Role.REDUCE_GRAD: Role.REDUCE_GRAD_WAIT,
    Role.ALL_REDUCE_GRAD: Role.REDUCE_GRAD_WAIT,
}


class Kind(NamedTuple):
    """What follows from a target."""

    role: Role
    is_collective: bool
    is_mutation: bool
    name: str
    target: Any


def _kind(target: Any, name: str) -> Kind:
    role = _BY_NAME.get(name, Role.OTHER)
    collective = name.startswith("_c10d_functional") and not name.endswith("wait_tensor")
    mutates = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return Kind(role, role in COLLECTIVES or collective, mutates, name, target)


_KINDS: dict[int, Kind] = {}
"""Kinds of functions met so far, by identity, since the hash of an operator is a call. The function is kept, so that no
other object can take its place in memory."""
_OF_OP = {op: _kind(None, op) for op in ("placeholder", "output", "get_attr", "call_method", "call_module")}


def kind_of(node: fx.Node) -> Kind:
    """What follows from the target of `node`."""
    return _KINDS.get(id(node.target)) or _OF_OP.get(node.op) or _new_kind(node.target)


def _new_kind(target: Any) -> Kind:
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
    else:
        name = "getitem" if target is operator.getitem else getattr(target, "__name__", str(target))
    _KINDS[id(target)] = kind = _kind(target, name)
    return kind


def target_name(node: fx.Node) -> str:
    """``"namespace::op"`` of an operator, the name of a function, or the kind of a node without a target."""
    return kind_of(node).name


def role_of(node: fx.Node) -> Role:
    """The role of `node`, from its target alone."""
    return (_KINDS.get(id(node.target)) or kind_of(node))[0]


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
