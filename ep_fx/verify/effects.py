"""Rule `effects`: what the Manifest says the model does is still done; no clean-up took it away.

Buffer updates in place, a dispatch and a combine for each run of each region, and the full output.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ep_fx.graph.effects import written_by
from ep_fx.verify.facts import Facts
from ep_fx.verify.rule import Violation, rule


@rule("effects", "every buffer update, every region's dispatch and combine, and every output of the Manifest is there")
def effects(facts: Facts) -> Iterator[Violation]:
    yield from _buffers(facts)
    yield from _regions(facts)
    yield from _outputs(facts)


def _buffers(facts: Facts) -> Iterator[Violation]:
    due = {b.placeholder: b.name for b in facts.manifest.buffers if b.mutated}
    if not due:
        return
    facts.checked += len(due)
    written = {
        memory[0].target
        for node in facts.writers
        for value in written_by(node)
        for memory in facts.aliases.memory(value)
    }
    for placeholder, name in due.items():
        if placeholder not in written:
            yield Violation(
                at=next((n for n in facts.nodes if n.target == placeholder), facts.output),
                expected=f"an in-place update of buffer {name!r}, as in the model's forward",
                got="no node writes it",
                remedy="keep in-place writes when removing what nobody reads",
            )


def _regions(facts: Facts) -> Iterator[Violation]:
    regions = facts.regions.all
    due = Counter(r.name for r in facts.manifest.regions)
    there = Counter(r.name for r in regions)
    facts.checked += sum(due.values())
    for name in dict.fromkeys([*due, *there]):
        if due[name] != there[name]:
            yield Violation(
                at=next((r.dispatch for r in regions if r.name == name), facts.output),
                expected=f"region {name!r} dispatched {due[name]} times",
                got=f"{there[name]} times",
                remedy="keep the regions that capture found, under their names",
            )
    backward = {r.name for r in facts.manifest.regions if r.has_backward} if facts.manifest.tangents else set()
    for region in regions:
        missing = [] if region.combine_ends else ["combine"]
        if region.name in backward and not region.combine_backward_starts:
            missing.append("combine_backward")
        if missing:
            yield Violation(
                at=region.dispatch,
                expected=f"a {' and a '.join(missing)} of region {region.name!r}",
                got="none takes the context of this dispatch",
                remedy="remove no part of a region",
            )


def _outputs(facts: Facts) -> Iterator[Violation]:
    manifest = facts.manifest
    due = (manifest.num_outputs, len(manifest.trainable) if manifest.tangents else 0, len(manifest.input_grads))
    got = tuple(len(facts.output_group(i)) for i in range(3))
    facts.checked += 3
    if got != due:
        yield Violation(
            at=facts.output,
            expected=f"{due[0]} outputs, {due[1]} parameter gradients, {due[2]} input gradients",
            got=f"{got[0]}, {got[1]}, {got[2]}",
            remedy="leave the structure of the output as capture made it",
        )
