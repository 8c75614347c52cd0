"""An event simulation of a pipeline schedule, independent of the step-time formula: every forward and backward pass of
every chunk and microbatch starts when its rank is free and its inputs are there.
"""

from __future__ import annotations

from collections.abc import Sequence

Operation = tuple[str, int, int]
"""('F' or 'B', chunk, microbatch)."""


def order_1f1b(rank: int, ranks: int, microbatches: int) -> list[Operation]:
    """Warm-up forwards, then one forward, one backward, then the remaining backwards."""
    warmup = min(ranks - 1 - rank, microbatches)
    ops: list[Operation] = [("F", 0, m) for m in range(warmup)]
    for i in range(microbatches - warmup):
        ops += [("F", 0, warmup + i), ("B", 0, i)]
    return ops + [("B", 0, m) for m in range(microbatches - warmup, microbatches)]


def order_interleaved(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Operation]:
    """Megatron's interleaved 1F1B with microbatch groups of ``ranks``."""
    total = chunks * microbatches
    forward: list[tuple[int, int]] = []
    for start in range(0, microbatches, ranks):
        for chunk in range(chunks):
            forward += [(chunk, m) for m in range(start, min(start + ranks, microbatches))]
    backward = [(chunks - 1 - chunk, m) for chunk, m in forward]
    warmup = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
    ops: list[Operation] = [("F", *forward[i]) for i in range(warmup)]
    for i in range(total - warmup):
        ops += [("F", *forward[warmup + i]), ("B", *backward[i])]
    return ops + [("B", *backward[i]) for i in range(total - warmup, total)]


def simulate(
    forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], microbatches: int
) -> tuple[float, list[int]]:
    """(makespan, peak forward passes held per rank); times are ``[rank][chunk]``."""
    ranks, chunks = len(forward), len(forward[0])
    orders = [
        order_1f1b(r, ranks, microbatches) if chunks == 1 else order_interleaved(r, ranks, chunks, microbatches)
        for r in range(ranks)
    ]
    done: dict[tuple[str, int, int, int], float] = {}
    clock, at = [0.0] * ranks, [0] * ranks
    held, peak = [0] * ranks, [0] * ranks

    def needs(rank: int, op: Operation) -> tuple[str, int, int, int] | None:
        kind, chunk, m = op
        if kind == "F":
            if rank > 0:
                return ("F", rank - 1, chunk, m)
            return ("F", ranks - 1, chunk - 1, m) if chunk > 0 else None
        if rank < ranks - 1:
            return ("B", rank + 1, chunk, m)
        return ("B", 0, chunk + 1, m) if chunk < chunks - 1 else ("F", rank, chunk, m)

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while at[rank] < len(orders[rank]):
                op = orders[rank][at[rank]]
                before = needs(rank, op)
                if before is not None and before not in done:
                    break
                start = max(clock[rank], done[before] if before is not None else 0.0)
                kind, chunk, m = op
                clock[rank] = start + (forward if kind == "F" else backward)[rank][chunk]
                done[(kind, rank, chunk, m)] = clock[rank]
                held[rank] += 1 if kind == "F" else -1
                peak[rank] = max(peak[rank], held[rank])
                at[rank] += 1
                moved = True
    assert all(at[r] == len(orders[r]) for r in range(ranks)), "the schedule has a deadlock"
    return max(clock), peak
