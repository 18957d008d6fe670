"""Every gathering of a parameter: what starts it, waits for it, reads the whole value, and frees it.

    [pad_shard] unshard unshard_wait getitem [assemble] readers.. reshard

A reader counts through any alias. Taken from targets, arguments and the Manifest alone. One walk, O(nodes).
"""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ep_fx.graph.aliases import Aliases, Memory
from ep_fx.graph.manifest import Manifest, ParameterSpec
from ep_fx.graph.roles import Role, role_of


@dataclass(eq=False, slots=True)
class Gather:
    """One parameter, gathered once.

    Args:
        unshard: the node that starts it.
        index: place of the parameter in its list.
        shard: what is gathered, None where the list holds no node.
        pad: the `pad_shard` before it.
        parameter: whose shard it is, None for a value that is no parameter.
        waits: waits for it.
        assembled: copies of uneven blocks.
        readers: nodes that read the gathered value, or the assembled one.
        block_readers: those that read the gathered blocks, `assemble` included.
        reshards: nodes that free the whole parameter.
        block_reshards: nodes that free the gathered blocks of an assembled one.
    """

    unshard: fx.Node
    index: int
    shard: fx.Node | None
    pad: fx.Node | None
    parameter: ParameterSpec | None
    waits: list[fx.Node] = field(default_factory=list)
    assembled: list[fx.Node] = field(default_factory=list)
    readers: list[fx.Node] = field(default_factory=list)
    block_readers: list[fx.Node] = field(default_factory=list)
    reshards: list[fx.Node] = field(default_factory=list)
    block_reshards: list[fx.Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the parameter, for messages."""
        return self.parameter.name if self.parameter else f"element {self.index} of %{self.unshard.name}"


class Gathers:
    """All gathers of a graph, in order.

    Args:
        manifest: whose parameters the placeholders are.
        aliases: of all nodes, in order.
    """

    def __init__(self, manifest: Manifest, aliases: Aliases) -> None:
        self._parameters = {p.placeholder: p for p in manifest.parameters}
        self._aliases = aliases
        self._by_memory: dict[Memory, tuple[Gather, ...]] = {}
        self._assembled: set[fx.Node] = set()
        self.of_unshard: dict[fx.Node, list[Gather]] = {}
        """The gathers that each `unshard` starts, in the order of its list."""
        self.holders: dict[fx.Node, tuple[Gather, ...]] = {}
        """Every node that may hold gathered memory, and whose."""
        self.stray_reshards: list[tuple[fx.Node, fx.Node]] = []
        """(reshard, argument) where the argument is no gathered value."""
        table = aliases.table
        holds = bytearray(len(table))
        for index, (kind, inputs) in enumerate(zip(table.kinds, table.inputs, strict=True)):
            role = kind.role
            if role is Role.UNSHARD:
                self._start(table.nodes[index])
                holds[index] = True
            elif role is Role.RESHARD:
                self._free(table.nodes[index])
            else:
                for source in inputs:
                    if holds[source]:
                        holds[index] = self._read(table.nodes[index], role)
                        break

    @property
    def all(self) -> list[Gather]:
        """Every gather, in order."""
        return [gather for gathers in self.of_unshard.values() for gather in gathers]

    def _start(self, node: fx.Node) -> None:
        listed = node.args[0] if node.args else ()
        shards = listed if isinstance(listed, (list, tuple)) else ()
        gathers = []
        for index, value in enumerate(shards):
            shard = value if isinstance(value, fx.Node) else None
            pad = shard if shard is not None and role_of(shard) is Role.PAD_SHARD else None
            source = pad.args[0] if pad is not None else shard
            name = source.target if isinstance(source, fx.Node) and source.op == "placeholder" else None
            gather = Gather(node, index, shard, pad, self._parameters.get(str(name)))
            self._by_memory[node, index] = (gather,)
            gathers.append(gather)
        self.of_unshard[node] = gathers
        self._by_memory[node, None] = tuple(gathers)
        self.holders[node] = tuple(gathers)

    def _free(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            owners = self.holders.get(value, ())
            if not owners:
                self.stray_reshards.append((node, value))
            for gather in owners:
                whole = not gather.assembled or self._reads_assembled(value)
                (gather.reshards if whole else gather.block_reshards).append(node)

    def _read(self, node: fx.Node, role: Role) -> bool:
        """Enters a node that reads gathered memory; whether it holds such memory itself."""
        if role is not Role.GETITEM:
            for value in node._input_nodes:
                if value in self.holders:
                    self._note(node, role, value)
        if role is Role.ASSEMBLE:
            source = node.args[0]
            self._by_memory[node, None] = self.holders.get(source, ()) if isinstance(source, fx.Node) else ()
            self.holders[node] = self._by_memory[node, None]
            self._assembled.add(node)
            return True
        if not self._aliases.is_shared(node):
            return False
        memory = self._aliases.memory(node)
        if len(memory) == 1:
            owners = self._by_memory.get(memory[0], ())
        else:
            owners = tuple(dict.fromkeys(g for place in memory for g in self._by_memory.get(place, ())))
        if owners:
            self.holders[node] = owners
        return bool(owners)

    def _note(self, node: fx.Node, role: Role, value: fx.Node) -> None:
        """Enters `node`, which reads `value`, in the gathers whose memory that is."""
        for gather in self.holders[value]:
            if role is Role.UNSHARD_WAIT:
                gather.waits.append(node)
            elif role is Role.ASSEMBLE:
                gather.assembled.append(node)
                gather.block_readers.append(node)
            else:
                gather.readers.append(node)
                if not self._reads_assembled(value):
                    gather.block_readers.append(node)

    def _reads_assembled(self, value: fx.Node) -> bool:
        return bool(self._assembled) and any(memory[0] in self._assembled for memory in self._aliases.memory(value))
