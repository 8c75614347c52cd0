"""Paths through a pipeline schedule: the one that decides its length, and those that bound the length of other cuts.

A path is a path whatever its passes take, so its length bounds every cut of the same shape from below. Paths are looked
for where the backward pass is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from parsolve.errors import InternalError
from parsolve.functions import Array
from parsolve.objectives.schedule import Shape, chunk_order, neighbours, warmup
from parsolve.objectives.schedule_length import ends_of_cases

ROUNDS = 3
"""Groups of pp microbatches in the short schedule of ``long_paths``."""
TESTED = 8
"""How often more its cycle is put in when the result is followed pass by pass."""


class Path(NamedTuple):
    """A path through the schedule: how many passes of each stage lie on it, (…, stage), and how many transfers, (…).

    One path, or many stacked.
    """

    forward: Array
    backward: Array
    transfers: Any

    def length(self, forward: Array, backward: Array, delay: Any = 0.0) -> Any:
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
    chunk, _ = chunk_order(shape)
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


def long_paths(shape: Shape, forward: Array, backward: Array, delay: Any = 0.0) -> list[Path]:
    """A path of the schedule for each case, mostly the longest, found on fewer microbatches.

    The order of passes repeats itself every group of microbatches. Where the longest path of the short schedule comes
    to the same pass of the next group, the part between is put in once more for each group left out. The result is
    followed pass by pass through a longer schedule; if it is no path there the longest one is looked for.
    ``forward``, ``backward``: (stage, case); ``delay``: one, or (case,).
    """
    pp, vpp, m, kind = shape
    fewer = ROUNDS * pp + m % pp
    if kind != "1f1b" or m <= fewer + pp:
        return [_path(shape, *way) for way in _walks(shape, forward, backward, delay)[1]]
    short = Shape(pp, vpp, fewer)
    period = pp if vpp > 1 else 1
    delays = np.broadcast_to(delay, forward.shape[1:])
    found = []
    for case, (on_path, _) in enumerate(_walks(short, forward, backward, delay)[1]):
        durations = np.repeat(np.concatenate((forward[:, case], backward[:, case])), fewer)
        path = _lengthened(shape, on_path[::-1], _cycle(on_path[::-1], durations, period, fewer), fewer, period)
        found.append(path or critical_path(shape, forward[:, case], backward[:, case], delays[case])[1])
    return found


def _lengthened(shape: Shape, on_path: Array, cycle: slice | None, fewer: int, period: int) -> Path | None:
    """The path of a schedule with ``fewer`` microbatches with its cycle as often as ``shape`` has room for.

    None where it is no path: where a pass does not follow the one before in the order of a schedule with the cycle
    ``TESTED`` times more, or as often as there is room for. More often it follows on itself the same way.
    """
    if cycle is None:
        return None
    times = (shape.microbatches - fewer) // period
    tested = min(times, TESTED)
    m = fewer + tested * period
    part = np.arange(cycle.start, cycle.stop)
    which = np.concatenate((np.arange(cycle.start), np.tile(part, tested + 1), np.arange(cycle.stop, len(on_path))))
    later = np.repeat(
        [0, *range(tested + 1), tested], [cycle.start, *[len(part)] * (tested + 1), len(on_path) - part[-1] - 1]
    )
    passes = on_path[which] // fewer * m + on_path[which] % fewer + later * period
    previous, inputs, sent = neighbours(shape._replace(microbatches=m))
    after, before = passes[1:], passes[:-1]
    on_rank, by_input = previous[after] == before, inputs[after] == before
    if not np.all(on_rank | by_input):
        return None
    by_transfer = by_input & ~on_rank & sent[after]
    path = _path(shape._replace(microbatches=m), passes, int(by_transfer.sum()))
    once = slice(cycle.start + len(part), cycle.stop + len(part))  # one more time, entered from the cycle itself
    more = _path(shape._replace(microbatches=m), passes[once], int(by_transfer[once.start - 1 : once.stop - 1].sum()))
    return Path(*(column + (times - tested) * extra for column, extra in zip(path, more, strict=True)))


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


def _path(shape: Shape, on_path: Array, transfers: int) -> Path:
    stages = shape.pp * shape.vpp
    counts = np.bincount(on_path // shape.microbatches, minlength=2 * stages)
    return Path(counts[:stages], counts[stages:], transfers)


def _walks(shape: Shape, forward: Array, backward: Array, delay: Any) -> tuple[Array, list[tuple[Array, int]]]:
    """For each case the makespan; the longest path from its last pass back, and its transfers."""
    _whole(shape)
    ends = ends_of_cases(shape, forward, backward, delay)
    previous, inputs, sent = neighbours(shape)
    lengths = ends.max(axis=0)
    lag = np.where(sent[:, None], delay, 0.0)
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
