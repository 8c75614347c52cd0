"""An event simulation of a pipeline schedule, independent of the step-time formula: every forward and backward pass of
every chunk and microbatch starts when its rank is free and its inputs are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


def order_gpipe(ranks: int, chunks: int, microbatches: int) -> list[Operation]:
    """All forward passes, then all backward passes, the last first. Source: Huang et al. 2019, figure 2c."""
    groups = [range(start, min(start + ranks, microbatches)) for start in range(0, microbatches, ranks)]
    forward = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    return [("F", *one) for one in forward] + [("B", *one) for one in reversed(forward)]


def order_of(rank: int, ranks: int, chunks: int, microbatches: int, kind: str) -> list[Operation]:
    """The passes of a rank in ``1f1b`` (interleaved with more than one chunk) or ``gpipe``."""
    if kind == "gpipe":
        return order_gpipe(ranks, chunks, microbatches)
    if chunks == 1:
        return order_1f1b(rank, ranks, microbatches)
    return order_interleaved(rank, ranks, chunks, microbatches)


class Simulated(NamedTuple):
    """Length of the schedule; for each rank the most forward passes, and layers times microbatches, held at once."""

    makespan: float
    passes: list[int]
    layers: list[int]


def simulate(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    *,
    delay: float = 0.0,
    kind: str = "1f1b",
    layers: Sequence[Sequence[int]] | None = None,
) -> Simulated:
    """Times and ``layers`` are ``[rank][chunk]``; a pass's output is on another rank ``delay`` after its end."""
    ranks, chunks = len(forward), len(forward[0])
    layers = layers or [[1] * chunks] * ranks
    orders = [order_of(r, ranks, chunks, microbatches, kind) for r in range(ranks)]
    done: dict[tuple[str, int, int, int], float] = {}
    clock, at = [0.0] * ranks, [0] * ranks
    held, peak = [0] * ranks, [0] * ranks
    layers_held, layers_peak = [0] * ranks, [0] * ranks

    def needs(rank: int, op: Operation) -> tuple[str, int, int, int] | None:
        side, chunk, m = op
        if side == "F":
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
                arrival = 0.0
                if before is not None:
                    arrival = done[before] + (delay if before[1] != rank else 0.0)
                side, chunk, m = op
                clock[rank] = max(clock[rank], arrival) + (forward if side == "F" else backward)[rank][chunk]
                done[(side, rank, chunk, m)] = clock[rank]
                sign = 1 if side == "F" else -1
                held[rank] += sign
                layers_held[rank] += sign * layers[rank][chunk]
                peak[rank] = max(peak[rank], held[rank])
                layers_peak[rank] = max(layers_peak[rank], layers_held[rank])
                at[rank] += 1
                moved = True
    assert all(at[r] == len(orders[r]) for r in range(ranks)), "the schedule has a deadlock"
    return Simulated(max(clock), peak, layers_peak)
