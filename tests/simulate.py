"""An event simulation of a pipeline schedule, independent of the step-time formula: every pass of every chunk and
microbatch starts when its rank is free and its inputs are there.

A rank's order is a list of steps. The passes of a step run one after the other, and what they put out is sent when the
step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Operation = tuple[str, int, int]
"""('F', 'B' or 'W', chunk, microbatch)."""
Step = list[Operation]
SPLIT = ("zero-bubble", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")


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


def order_zero_bubble(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Step]:
    """PyTorch's ScheduleInterleavedZeroBubble: W ``rank`` input gradients behind, the rest at the end."""
    size = microbatches // max(1, microbatches // ranks)
    forward: list[tuple[int, int]] = []
    for start in range(0, microbatches, size):
        for chunk in range(chunks):
            forward += [(chunk, m) for m in range(start, start + size)]
    backward = [(chunks - 1 - chunk, m) for chunk, m in forward]
    warmup = min(len(forward), (chunks - 1) * size + ranks - 1 - rank)
    steps: list[Step] = [[("F", *one)] for one in forward[:warmup]]
    for done, one in enumerate(backward):
        if warmup + done < len(forward):
            steps.append([("F", *forward[warmup + done])])
        steps.append([("B", *one)])
        if done >= rank:
            steps.append([("W", *backward[done - rank])])
    late = backward[max(0, len(backward) - rank) :]
    return steps + [[("W", *one)] for one in late]


def numbered(words: Sequence[str], microbatches: int) -> list[Step]:
    """Steps written as ``F0``, ``B1``, ``W1``, ``D1`` (B and W at once), ``F0D1`` (a pair): microbatches in turn.

    Those that there are not are left out.
    """
    count: dict[tuple[str, int], int] = {}
    steps = []
    for word in words:
        step: Step = []
        for side, chunk in zip(word[::2], map(int, word[1::2]), strict=True):
            for one in "BW" if side == "D" else side:
                m = count.get((one, chunk), 0)
                count[one, chunk] = m + 1
                step += [(one, chunk, m)] * (m < microbatches)
        steps += [step] if step else []
    return steps


def order_zbv(rank: int, ranks: int, microbatches: int) -> list[Step]:
    """PyTorch's ScheduleZBVZeroBubble."""
    ahead, total = ranks - rank, max(microbatches, 2 * ranks - 1)
    words = ["F0"] * (2 * ahead - 1) + ["F1", "F0"] * rank + ["F1", "B1", "W1"] * ahead
    begun, turned = 2 * ahead - 1 + rank, ranks
    while turned < total:
        words += ["F0"] * (begun < total) + ["B0", "W0", "F1", "B1", "W1"]
        begun, turned = min(total, begun + 1), turned + 1
    words += ["B0", "B1"] * rank + ["B0", "W0"] * ahead
    words += ["W1"] * (total - words.count("W1"))
    words += ["W0"] * (total - words.count("W0"))
    return numbered(words, microbatches)


def order_dualpipev(rank: int, ranks: int, microbatches: int) -> list[Step]:
    """PyTorch's ScheduleDualPipeV; ``D``: the whole backward pass, ``F0D1``: an overlapped pair."""
    behind = ranks - 1 - rank
    words = ["F0"] * (2 * behind) + ["F0", "F1"] * (rank + 1) + ["B1", "W1", "F1"] * behind
    main = ["F0D1", "F1D0"] * (microbatches - 2 * ranks + rank + 1)
    words += main if behind else ["F0", "D1", *main[1:]]
    words += ["D1", "F1D0"] * behind
    last = ["1", "0"] * (rank + 1)
    words += ["D" + chunk for chunk in last[: rank + 1]]
    late = last[rank + 1 :]
    words += ["B" + chunk for chunk in late]
    for _ in range(behind):
        words += ["W" + late.pop(0), "B0"]
        late.append("0")
    return numbered([*words, *("W" + chunk for chunk in late)], microbatches)


def order_of(rank: int, ranks: int, chunks: int, microbatches: int, kind: str) -> list[Step]:
    """The steps of a rank in a schedule; ``1f1b`` is interleaved with more than one chunk."""
    if kind == "zero-bubble":
        return order_zero_bubble(rank, ranks, chunks, microbatches)
    if kind == "zbv":
        return order_zbv(rank, ranks, microbatches)
    if kind == "dualpipev":
        return order_dualpipev(rank, ranks, microbatches)
    if kind == "gpipe":
        plain = order_gpipe(ranks, chunks, microbatches)
    elif chunks == 1:
        plain = order_1f1b(rank, ranks, microbatches)
    else:
        plain = order_interleaved(rank, ranks, chunks, microbatches)
    return [[one] for one in plain]


class Simulated(NamedTuple):
    """Length of the schedule; for each rank the most passes, and layers times microbatches, held at once.

    ``waiting``: the most layers times microbatches between B and W, those of the first stage left out; ``both``: the
    most of ``layers`` and a share of ``waiting`` together.
    """

    makespan: float
    passes: list[int]
    layers: list[int]
    waiting: list[int]
    both: list[float]


def simulate(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    *,
    delay: float = 0.0,
    kind: str = "1f1b",
    layers: Sequence[Sequence[int]] | None = None,
    weight: Sequence[Sequence[float]] | None = None,
    share: float = 0.0,
) -> Simulated:
    """Times and ``layers`` are ``[rank][chunk]``; what is sent is on another rank ``delay`` after its step's end."""
    ranks, chunks = len(forward), len(forward[0])
    layers = layers or [[1] * chunks] * ranks
    times = {"F": forward, "B": backward, "W": weight or [[0.0] * chunks] * ranks}
    orders = [order_of(r, ranks, chunks, microbatches, kind) for r in range(ranks)]
    home = {}
    for rank in range(ranks):
        for chunk in range(chunks):
            back = kind in V_SHAPED and chunk % 2
            home[chunk * ranks + (ranks - 1 - rank if back else rank)] = (rank, chunk)
    stage_of = {place: stage for stage, place in home.items()}
    ended: dict[tuple[str, int, int], float] = {}
    sent: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * ranks
    todo = [[(one, i == len(step) - 1, step) for step in order for i, one in enumerate(step)] for order in orders]
    at = [0] * ranks
    held, peak = [0] * ranks, [0] * ranks
    layers_held, layers_peak = [0] * ranks, [0] * ranks
    waits, waits_peak, both = [0] * ranks, [0] * ranks, [0.0] * ranks

    def needs(side: str, stage: int, m: int) -> tuple[str, int, int] | None:
        if side == "F":
            return ("F", stage - 1, m) if stage else None
        if side == "W":
            return ("B", stage, m)
        return ("B", stage + 1, m) if stage + 1 < ranks * chunks else ("F", stage, m)

    def arrival(rank: int, before: tuple[str, int, int] | None) -> float | None:
        if before is None:
            return 0.0
        if home[before[1]][0] == rank:
            return ended.get(before)
        return sent[before] + delay if before in sent else None

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while at[rank] < len(todo[rank]):
                (side, chunk, m), last, step = todo[rank][at[rank]]
                stage = stage_of[rank, chunk]
                there = arrival(rank, needs(side, stage, m))
                if there is None:
                    break
                clock[rank] = max(clock[rank], there) + times[side][rank][chunk]
                ended[side, stage, m] = clock[rank]
                if last:
                    sent |= {(s, stage_of[rank, c], k): clock[rank] for s, c, k in step}
                if side == "F" or side == ("W" if kind in SPLIT else "B"):
                    sign = 1 if side == "F" else -1
                    held[rank] += sign
                    layers_held[rank] += sign * layers[rank][chunk]
                if side != "F" and stage > 0:
                    waits[rank] += layers[rank][chunk] * (1 if side == "B" else -1)
                peak[rank] = max(peak[rank], held[rank])
                layers_peak[rank] = max(layers_peak[rank], layers_held[rank])
                waits_peak[rank] = max(waits_peak[rank], waits[rank])
                both[rank] = max(both[rank], layers_held[rank] + share * waits[rank])
                at[rank] += 1
                moved = True
    assert all(at[r] == len(todo[r]) for r in range(ranks)), "the schedule has a deadlock"
    return Simulated(max(clock), peak, layers_peak, waits_peak, both)
