"""Why each rule is there: what goes wrong in a run that breaks it. Shown in docs/verification.md."""

from __future__ import annotations

WHY: dict[str, str] = {
    "order": (
        "A pass that moves nodes may put a read before the write it needs, or a free before a use that no "
        "data edge shows. The run then reads stale or freed memory."
    ),
    "types": (
        "A pass that inserts a node with another shape, dtype, device or stride leaves every node after it "
        "described wrongly; kernels fail late, or read memory in another order."
    ),
    "pair": (
        "Where combine takes the splits or the permutation of another dispatch, of another layer or micro- "
        "batch, rows come back to other tokens. Sizes often agree, so nothing crashes and the loss looks "
        "plausible."
    ),
    "no-state": (
        "State on a module is overwritten by the next micro-batch. A graph that reads and writes nothing but "
        "its own values can have any number of micro-batches in flight."
    ),
    "live": (
        "A weight read before its gather arrived, or after its storage was freed, is garbage; a view of it is "
        "the same memory under another name."
    ),
    "once": (
        "A second gather costs time, a missing free costs the memory that sharding was to save; neither "
        "changes a number, so no loss curve shows it."
    ),
    "ep-order": (
        "Hooks of FSDP and EP run in the order in which they happened to be registered. Here the order of "
        "unshard, dispatch, combine and reshard is the convention's, on every rank."
    ),
    "reduce-once": (
        "A gradient that is summed twice over a dimension, or not at all, is wrong by a factor or by a rank's "
        "share. Adam hides the factor; the model trains, worse."
    ),
    "divisor": (
        "Dividing by the size of the group that was reduced over, instead of by the number of data ranks, "
        "makes expert gradients too large by the size of ep. It is the most common silent fault of expert "
        "parallelism."
    ),
    "partial": (
        "Ranks along tp compute summands of an expert's output. One that is not added up, or twice, or only after "
        "something that is not linear, is another number with the right shape, in forward and in backward."
    ),
    "saved": (
        "A gathered weight, or a view of it, among the values kept for backward keeps the whole weight alive "
        "from forward to backward: freeing it in forward was in vain."
    ),
    "peak": (
        "A schedule that starts every gather at the top computes the right numbers and needs the memory of "
        "the whole model."
    ),
    "wait": (
        "A collective runs beside the computation until it is waited for. A read without the wait sees "
        "whatever is there; a wait too many can hang."
    ),
    "effects": (
        "Clean-up removes what nobody reads. Buffer updates, collectives and whole MoE regions have effects "
        "that no reader shows; without them counters freeze, or other ranks wait for ever."
    ),
    "computes": (
        "Passes move, split and shard; they do not change what the model computes. A lost operator or a "
        "changed argument is a different model."
    ),
}
"""One sentence or two for each rule of the table."""
