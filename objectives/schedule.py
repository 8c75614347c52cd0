"""The exact length of a pipeline schedule: the longest path through its operations, and the paths that bound it.

Stage ``s`` of ``pp*vpp`` in model order is chunk ``s // pp`` of rank ``s % pp``, or of rank ``pp-1 - s % pp`` for odd
chunks where the stages are placed in a V. Every rank runs its passes in the schedule's fixed order; a pass starts when
its rank is free and its input has arrived. The length is therefore a maximum, over paths, of sums of pass times: convex
and piecewise linear in them. ``critical_path`` gives the path that decides, and the same path bounds every other cut of
the same shape from below; paths are looked for where the backward pass is whole.
Source: Narayanan et al. 2021, section 2.2; Megatron-Core's schedules.py (interleaving in groups of pp microbatches);
Huang et al. 2019 (GPipe).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from parsolve.errors import InternalError
from parsolve.functions import Array
from parsolve.objectives import split_backward
from parsolve.objectives.split_backward import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from parsolve.specs.workload import FOLDED, SPLIT_BACKWARD
from parsolve.splits import ranks_in_model_order


class Shape(NamedTuple):
    """What fixes the order of all passes. ``kind``: a schedule; ``1f1b`` is interleaved when vpp > 1."""

    pp: int
    vpp: int
    microbatches: int
    kind: str = "1f1b"

    @property
    def splits_backward(self) -> bool:
        """The backward pass is two passes, for the gradients of inputs and of weights."""
        return self.kind in SPLIT_BACKWARD

    @property
    def ranks(self) -> Array:
        """(stage,) the rank of each stage in model order."""
        return ranks_in_model_order(self.pp, self.vpp, self.kind)


def shape_of(pp: int, vpp: int, microbatches: int, kind: str = "1f1b") -> Shape:
    """The schedule of a configuration; an interleaved one needs whole groups of pp, and its last is filled up.

    Without that an illegal number of microbatches would have no schedule at all: its passes wait for each other. For
    the same reason a V of other than two stages a rank counts as 1F1B.
    """
    if kind in FOLDED and vpp != 2:
        kind = "1f1b"
    if kind in SPLIT_BACKWARD:
        return Shape(pp, vpp, split_backward.legal_microbatches(kind, pp, microbatches), kind)
    return Shape(pp, vpp, microbatches if vpp == 1 else -(-microbatches // pp) * pp, kind)


def saturated_shape(shape: Shape) -> Shape:
    """Of a split backward pass: a schedule of few microbatches in which every rank holds as much at once."""
    if not shape.splits_backward:
        return shape
    few = split_backward.saturated_microbatches(shape.kind, shape.pp, shape.microbatches)
    return shape._replace(microbatches=few)


@dataclass(frozen=True)
class Order:
    """One rank's passes in order: ``passes`` and ``inputs`` index the flat array of all passes.

    Forward of stage s, microbatch k is ``s*m + k``, its backward ``(S + s)*m + k``, where that is split its weight
    gradients ``(2*S + s)*m + k``; input -1: none. ``sent`` is true where the input comes from another rank.
    """

    passes: Array
    inputs: Array
    sent: Array


def _chunk_order(shape: Shape) -> tuple[Array, Array]:
    """(chunk, microbatch) of a rank's forward passes; backward passes take the chunks in reverse."""
    pp, vpp, m, _ = shape
    if vpp == 1:
        return np.zeros(m, np.int64), np.arange(m)
    starts = range(0, m, pp)
    chunks = [np.repeat(np.arange(vpp), min(pp, m - start)) for start in starts]
    members = [np.tile(np.arange(start, min(start + pp, m)), vpp) for start in starts]
    return np.concatenate(chunks), np.concatenate(members)


def warmup(shape: Shape, rank: int) -> int:
    """Forward passes before the first backward pass of a rank."""
    pp, vpp, m, kind = shape
    if kind == "gpipe":
        return m * vpp
    if vpp == 1:
        return min(m, pp - 1 - rank)
    return min(m * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * pp)


def _is_forward(shape: Shape, rank: int) -> Array:
    """The rank's sequence of passes: True forward, False backward."""
    total = shape.microbatches * shape.vpp
    first = warmup(shape, rank)
    steady = np.tile([True, False], total - first)
    return np.concatenate((np.ones(first, bool), steady, np.zeros(first, bool)))


@lru_cache(maxsize=64)
def orders(shape: Shape) -> tuple[Order, ...]:
    """The passes of every rank."""
    pp, vpp, m, kind = shape
    if kind in SPLIT_BACKWARD:
        return _split_orders(shape)
    stages = pp * vpp
    chunk, member = _chunk_order(shape)
    result = []
    for rank in range(pp):
        is_forward = _is_forward(shape, rank)
        stage = np.empty(len(is_forward), np.int64)
        batch = np.empty(len(is_forward), np.int64)
        stage[is_forward], batch[is_forward] = chunk * pp + rank, member
        stage[~is_forward], batch[~is_forward] = (vpp - 1 - chunk) * pp + rank, member
        before = np.where(is_forward, stage - 1, stages + stage + 1)
        turn = ~is_forward & (stage == stages - 1)  # the last stage turns round on its own output
        before[turn] = stages - 1
        inputs = np.where(before < 0, -1, before * m + batch)
        sent = (inputs >= 0) & ~turn & (pp > 1)
        result.append(Order(np.where(is_forward, stage, stages + stage) * m + batch, inputs, sent))
    return tuple(result)


def _split_orders(shape: Shape) -> tuple[Order, ...]:
    """The passes of every rank where weight gradients have passes of their own."""
    pp, vpp, m, kind = shape
    stages = pp * vpp
    of_rank = [split_backward.sequence(kind, pp, vpp, m, rank) for rank in range(pp)]
    at = np.empty((pp, vpp), np.int64)
    for stage, rank in enumerate(shape.ranks.tolist()):
        at[rank, stage // pp] = stage
    passes = [(one.kind * stages + at[rank][one.chunk]) * m + one.microbatch for rank, one in enumerate(of_rank)]
    sent_after = np.empty(3 * stages * m + 1, np.int64)
    sent_after[-1] = -1
    for mine, one in zip(passes, of_rank, strict=True):
        sent_after[mine] = mine[one.sent_after]
    result = []
    for rank, (mine, one) in enumerate(zip(passes, of_rank, strict=True)):
        stage = at[rank][one.chunk]
        before = np.where(one.kind == FORWARD, stage - 1, stages + stage + 1)
        turn = (one.kind == INPUT_GRADIENT) & (stage == stages - 1)
        before[turn] = stages - 1
        none = (before < 0) | (one.kind == WEIGHT_GRADIENT)
        inputs = np.where(none, -1, before * m + one.microbatch)
        other = shape.ranks[np.where(none, stage, before) % stages] != rank
        result.append(Order(mine, sent_after[inputs], other & ~none))
    return tuple(result)


def held_and_waiting(shape: Shape, rank: int) -> tuple[tuple[Array, Array], ...]:
    """What a rank holds in each phase; see ``split_backward.moments``. Of a whole backward pass nothing waits."""
    if not shape.splits_backward:
        return ((held(shape, rank), np.zeros((1, shape.vpp))),)
    return split_backward.moments(shape.kind, shape.pp, shape.vpp, shape.microbatches, rank)


@lru_cache(maxsize=1024)
def held(shape: Shape, rank: int) -> Array:
    """Microbatches held for the backward pass at the moments that matter: array (moment, chunk).

    A moment is just after a forward pass that a backward pass follows; those at which some other moment holds at least
    as much of every chunk are left out. From the first backward pass on the moments repeat every pp microbatches.
    Where the backward pass is split, activations are held until the weight gradients are there.
    """
    pp, vpp, m, kind = shape
    if kind in SPLIT_BACKWARD:
        return np.concatenate([held_then for held_then, _ in held_and_waiting(shape, rank)])
    chunk, _ = _chunk_order(shape)
    first, total = warmup(shape, rank), m * vpp
    done = np.cumsum(chunk[:, None] == np.arange(vpp), axis=0)
    if first == total:
        return np.asarray(done[-1:])
    back = np.cumsum((vpp - 1 - chunk)[:, None] == np.arange(vpp), axis=0)
    period = min(total - first, pp * vpp)
    moments = done[first : first + period]
    moments[1:] -= back[: period - 1]
    at_most = np.all(moments[:, None, :] <= moments[None, :, :], axis=2)
    earlier = np.tri(period, k=-1, dtype=bool)
    covered = at_most & (~at_most.T | earlier)
    return np.asarray(moments[~covered.any(axis=1)])


@lru_cache(maxsize=64)
def _steps(shape: Shape) -> list[list[tuple[int, int, bool]]]:
    """For each rank its passes in order: pass, input, and whether that is sent."""
    return [
        list(zip(order.passes.tolist(), order.inputs.tolist(), order.sent.tolist(), strict=True))
        for order in orders(shape)
    ]


def _ends_of_one(shape: Shape, durations: list[float], delay: float) -> list[float]:
    """When each pass ends, for the time that each takes: every rank goes on as far as its inputs are there."""
    ends = [-1.0] * len(durations) + [0.0]  # the last: what needs no input
    steps = _steps(shape)
    done, free = [0] * shape.pp, [0.0] * shape.pp
    left = len(durations)
    while left:
        before = left
        for rank, of_rank in enumerate(steps):
            now = free[rank]
            for step in range(done[rank], len(of_rank)):
                here, need, sent = of_rank[step]
                arrives = ends[need]
                if arrives < 0:
                    break
                if sent:
                    arrives += delay
                if arrives > now:
                    now = arrives
                now += durations[here]
                ends[here] = now
                done[rank] += 1
                left -= 1
            free[rank] = now
        if left == before:
            raise InternalError(f"the passes of {shape} wait for each other")
    return ends[:-1]


class _Level(NamedTuple):
    """Passes that wait for none of each other: where they stand, the one before each on its rank, and its input."""

    at: slice
    previous: Array
    inputs: Array


@lru_cache(maxsize=64)
def _levels(shape: Shape) -> tuple[Array, list[_Level]]:
    """All passes level by level, each after everything that it waits for; the levels refer to places in that order.

    The place after the last stands for what is there from the start.
    """
    previous, inputs, _ = _neighbours(shape)
    level = np.array(_ends_of_one(shape, [1] * len(inputs), 0), dtype=np.int64)
    passes = np.argsort(level, kind="stable")
    place = np.empty(len(passes) + 1, np.int64)
    place[passes], place[-1] = np.arange(len(passes)), len(passes)
    before_each, input_each = place[previous[passes]], place[inputs[passes]]
    ends = np.cumsum(np.bincount(level)[1:]).tolist()
    slices = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return passes, [_Level(at, before_each[at], input_each[at]) for at in slices]


def _ends(shape: Shape, forward: Array, backward: Array, delay: float, weight: Array | None = None) -> Array:
    """When each pass ends, (pass, case), for times (stage, case)."""
    kinds = (forward, backward) if weight is None else (forward, backward, weight)
    durations = np.repeat(np.concatenate(kinds), shape.microbatches, axis=0)
    if durations.shape[1] == 1:
        return np.array(_ends_of_one(shape, durations[:, 0].tolist(), delay))[:, None]
    passes, levels = _levels(shape)
    lag = np.where(_neighbours(shape)[2], delay, 0.0)[passes][:, None]
    durations = durations[passes]
    ends = np.zeros((len(passes) + 1, durations.shape[1]))
    for at, previous, inputs in levels:
        here = ends.take(inputs, axis=0)
        here += lag[at]
        np.maximum(here, ends.take(previous, axis=0), out=here)
        here += durations[at]
        ends[at] = here
    result = np.empty_like(durations)
    result[passes] = ends[:-1]
    return result


class Timeline(NamedTuple):
    """Every pass of a schedule, arrays (pass,) in the order of rank and start; times in s.

    Where the backward pass is split, ``is_backward`` are the passes for input gradients, ``is_weight`` for weights'.
    """

    rank: Array
    stage: Array
    microbatch: Array
    is_backward: Array
    start: Array
    end: Array
    is_weight: Array


def timeline(
    shape: Shape, forward: Array, backward: Array, delay: float = 0.0, weight: Array | None = None
) -> Timeline:
    """When each pass starts and ends; parameters as in ``makespan``, whose value is the last end."""
    ends = _ends(shape, forward[:, None], backward[:, None], delay, None if weight is None else weight[:, None])[:, 0]
    passes = np.concatenate([order.passes for order in orders(shape)])
    stage, microbatch = np.divmod(passes, shape.microbatches)
    kind, stage = np.divmod(stage, len(forward))
    durations = np.stack((forward, backward, np.zeros_like(forward) if weight is None else weight))
    rank, end = shape.ranks[stage], ends[passes]
    start = end - durations[kind, stage]
    same = rank[1:] == rank[:-1]
    start[1:] = np.where(same, np.maximum(start[1:], end[:-1]), start[1:])  # the last bits of a difference
    return Timeline(rank, stage, microbatch, kind == 1, start, end, kind == 2)


def makespan(shape: Shape, forward: Array, backward: Array, delay: float = 0.0, weight: Array | None = None) -> float:
    """Length of the schedule, s.

    Parameters
    ----------
    forward, backward: (pp*vpp,) time of one microbatch on each stage in model order, s.
    delay: time from the end of a pass until its output is on the next rank, during which both may compute, s.
    weight: (pp*vpp,) time of the weight gradients, where the backward pass is split; ``backward`` is without it.
    """
    return _makespan(shape, forward.tobytes(), backward.tobytes(), delay, b"" if weight is None else weight.tobytes())


@lru_cache(maxsize=4096)
def _makespan(shape: Shape, forward: bytes, backward: bytes, delay: float, weight: bytes) -> float:
    there, back, later = (np.frombuffer(part)[:, None] for part in (forward, backward, weight))
    return float(_ends(shape, there, back, delay, later if weight else None).max())


class Path(NamedTuple):
    """A path through the schedule: how many passes of each stage lie on it, (…, stage), and how many transfers, (…).

    One path, or many stacked.
    """

    forward: Array
    backward: Array
    transfers: Any

    def length(self, forward: Array, backward: Array, delay: float = 0.0) -> Any:
        """Sum of its passes, (…,); never above the makespan of the same shape, whatever the times, (…, stage)."""
        return (self.forward * forward + self.backward * backward).sum(axis=-1) + self.transfers * delay


def stacked(paths: Iterable[Path]) -> Path:
    """Many paths as one with arrays (path, stage) and (path,)."""
    return Path(*(np.array(column) for column in zip(*paths, strict=True)))


@lru_cache(maxsize=1024)
def plain_paths(shape: Shape) -> tuple[Path, ...]:
    """Paths that any 1F1B schedule has: for each rank up to four, stacked, all of them through its own passes.

    They reach the rank with the first microbatch, either straight to its first pass or through all stages and back to
    its first backward pass; and they leave it after its last backward pass, or with the last microbatch after its last
    forward pass through the rest of the stages and all the way back.
    """
    _whole(shape)
    pp, vpp, m, _ = shape
    stages = pp * vpp
    chunk, _ = _chunk_order(shape)
    total = len(chunk)
    done = np.concatenate((np.zeros((1, vpp), np.int64), np.cumsum(chunk[:, None] == np.arange(vpp), axis=0)))
    result = []
    for rank in range(pp):
        found = []
        alone = min(warmup(shape, rank) + 1, total)  # forward passes before the first backward pass, or the reverse
        last = (vpp - 1) * pp + rank  # the stage of its last chunk
        for start in ("straight", "turn"):
            for end in ("straight", "turn"):
                if start == end == "turn" and alone == total:
                    continue
                forward, backward = np.zeros((2, stages), np.int64)
                forward[rank::pp] = backward[rank::pp] = m
                if start == "straight":
                    forward[:rank] += 1
                else:
                    forward[rank::pp] -= done[alone]
                    forward += 1
                    backward[last + 1 :] += 1
                if end == "straight":
                    backward[:rank] += 1
                else:
                    backward[rank::pp] -= (done[total] - done[total - alone])[::-1]
                    forward[last + 1 :] += 1
                    backward += 1
                round_trip = stages - 1 + pp - 1 - rank
                transfers = sum(rank if way == "straight" else round_trip for way in (start, end))
                found.append(Path(forward, backward, transfers if pp > 1 else 0))
        result.append(stacked(found))
    return tuple(result)


def _whole(shape: Shape) -> None:
    if shape.splits_backward:
        raise InternalError(f"paths are not looked for in {shape}, whose backward pass is split")


def critical_path(shape: Shape, forward: Array, backward: Array, delay: float = 0.0) -> tuple[float, Path]:
    """The makespan and the longest path."""
    lengths, ways = _walks(shape, forward[:, None], backward[:, None], delay)
    return float(lengths[0]), _path(shape, *ways[0])


def long_paths(shape: Shape, forward: Array, backward: Array, delay: float = 0.0) -> list[Path]:
    """A path of the schedule for each case, mostly the longest, found on fewer microbatches.

    The order of passes repeats itself every group of microbatches. Where the longest path of the short schedule comes
    to the same pass of the next group, the part between is put in once more for each group left out. The result is
    followed pass by pass through the whole schedule; if it is no path there the longest one is looked for.
    ``forward``, ``backward``: (stage, case).
    """
    pp, vpp, m, kind = shape
    fewer = ROUNDS * pp + m % pp
    if kind != "1f1b" or m <= fewer + pp:
        return [_path(shape, *way) for way in _walks(shape, forward, backward, delay)[1]]
    short = Shape(pp, vpp, fewer)
    period = pp if vpp > 1 else 1
    found = []
    for case, (on_path, _) in enumerate(_walks(short, forward, backward, delay)[1]):
        durations = np.repeat(np.concatenate((forward[:, case], backward[:, case])), fewer)
        path = _lengthened(shape, on_path[::-1], _cycle(on_path[::-1], durations, period, fewer), fewer, period)
        found.append(path or critical_path(shape, forward[:, case], backward[:, case], delay)[1])
    return found


def _lengthened(shape: Shape, on_path: Array, cycle: slice | None, fewer: int, period: int) -> Path | None:
    """The path of a schedule with ``fewer`` microbatches with its cycle as often as ``shape`` has room for.

    None where a pass of it does not follow the one before in the order of ``shape``.
    """
    if cycle is None:
        return None
    m = shape.microbatches
    times = (m - fewer) // period
    part = np.arange(cycle.start, cycle.stop)
    which = np.concatenate((np.arange(cycle.start), np.tile(part, times + 1), np.arange(cycle.stop, len(on_path))))
    later = np.repeat(
        [0, *range(times + 1), times], [cycle.start, *[len(part)] * (times + 1), len(on_path) - part[-1] - 1]
    )
    passes = on_path[which] // fewer * m + on_path[which] % fewer + later * period
    previous, inputs, sent = _neighbours(shape)
    after, before = passes[1:], passes[:-1]
    on_rank, by_input = previous[after] == before, inputs[after] == before
    if not np.all(on_rank | by_input):
        return None
    return _path(shape, passes, int((by_input & ~on_rank & sent[after]).sum()))


def _cycle(on_path: Array, durations: Array, period: int, microbatches: int) -> slice | None:
    """The longest part of a path, in order of time, between a pass and the same pass ``period`` microbatches later.

    Looked for in the middle half of the path, where all ranks are past their warm-up and before their last passes.
    """
    low, high = len(on_path) // 4, -(-3 * len(on_path) // 4)
    middle = on_path[low:high]
    order = np.argsort(middle)
    later = middle + period
    at = np.minimum(np.searchsorted(middle, later, sorter=order), len(middle) - 1)
    end = order[at]
    same = (middle[end] == later) & (middle % microbatches + period < microbatches) & (end > np.arange(len(middle)))
    if not same.any():
        return None
    total = np.cumsum(durations[middle])
    start = int(np.argmax(np.where(same, total[end] - total, -1.0)))
    return slice(low + start, low + int(end[start]))


ROUNDS = 5
"""Groups of pp microbatches in the short schedule of ``long_paths``."""


def _path(shape: Shape, on_path: Array, transfers: int) -> Path:
    stages = shape.pp * shape.vpp
    counts = np.bincount(on_path // shape.microbatches, minlength=2 * stages)
    return Path(counts[:stages], counts[stages:], transfers)


@lru_cache(maxsize=64)
def _neighbours(shape: Shape) -> tuple[Array, Array, Array]:
    """For each pass: the one before it on its rank, its input, and whether that is sent; -1: none."""
    size = (2 + shape.splits_backward) * shape.pp * shape.vpp * shape.microbatches
    previous, inputs, sent = np.full(size, -1), np.full(size, -1), np.zeros(size, bool)
    for order in orders(shape):
        previous[order.passes[1:]] = order.passes[:-1]
        inputs[order.passes], sent[order.passes] = order.inputs, order.sent
    return previous, inputs, sent


def _walks(shape: Shape, forward: Array, backward: Array, delay: float) -> tuple[Array, list[tuple[Array, int]]]:
    """For each case the makespan; the longest path from its last pass back, and its transfers."""
    _whole(shape)
    ends = _ends(shape, forward, backward, delay)
    previous, inputs, sent = _neighbours(shape)
    lengths = ends.max(axis=0)
    lag = np.where(sent, delay, 0.0)[:, None]
    arrives = np.where(inputs[:, None] >= 0, ends[inputs] + lag, -1.0)
    free = np.where(previous[:, None] >= 0, ends[previous], -1.0)
    by_input = arrives > free + 1e-12 * lengths  # of equally long paths the one that stays on its rank
    following = np.where(by_input, inputs[:, None], previous[:, None])
    found = []
    for case in range(ends.shape[1]):
        way = following[:, case].tolist()
        at = int(np.argmax(ends[:, case]))
        on_path = []
        while at >= 0:
            on_path.append(at)
            at = way[at]
        passes = np.array(on_path)
        found.append((passes, int((by_input[:, case] & sent)[passes].sum())))
    return lengths, found
