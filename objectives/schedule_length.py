"""When each pass of a pipeline schedule ends, and with that the schedule's exact length.

The length is a maximum, over paths of passes that wait for each other, of sums of their times: convex and piecewise
linear in them (objectives.schedule_paths).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from parsolve.errors import InternalError
from parsolve.functions import Array
from parsolve.objectives.schedule import Shape, neighbours, orders

FEW_GROUPS = 8
"""Groups of pp microbatches in the first schedule that a longer one is looked for to repeat."""
SAME = 1e-14
"""Relative difference, of the length of a schedule, between two ways to add up the same times."""


class _Repeated(NamedTuple):
    """A schedule whose group of pp microbatches from ``before`` on can be put in again: each takes ``a_group`` s.

    ``ends``: (kind and stage, microbatch) of the schedule without that.
    """

    ends: Array
    before: int
    a_group: float

    def left_out(self, shape: Shape) -> int:
        """How often the group is put in again for the whole of a schedule."""
        return int(shape.microbatches - self.ends.shape[1]) // shape.pp

    def with_groups(self, times: int, pp: int) -> Array:
        """When each pass ends, (pass,), with the group so many times more."""
        after, end = self.before + pp, self.ends.shape[1]
        which = np.concatenate((np.arange(after), np.tile(np.arange(self.before, after), times), np.arange(after, end)))
        later = np.concatenate((np.zeros(after), np.repeat(np.arange(times) + 1, pp), np.full(end - after, times)))
        return np.asarray((self.ends[:, which] + self.a_group * later).ravel())


def _repeated(shape: Shape, of_stages: Array, delay: float) -> _Repeated | None:
    """The schedule on fewer microbatches, with a group that repeats itself; None: short, or not in step in time.

    The group is put in as often as the fewer microbatches have groups, and every pass is then held against what it
    waits for. As passes wait for each other in no circle there is one answer only, and what agrees everywhere is that
    answer. However often the group is put in, each pass stands to what it waits for, at most three groups away, as one
    of these does.
    """
    pp, vpp, m, kind = shape
    groups = FEW_GROUPS
    while kind == "1f1b" and 2 * groups * pp <= m:
        fewer = groups * pp + m % pp
        ends = _one_by_one(Shape(pp, vpp, fewer, kind), of_stages, delay).reshape(-1, fewer)
        before = groups // 2 * pp
        found = _Repeated(ends, before, float(ends[0, before + pp] - ends[0, before]))
        twice = Shape(pp, vpp, fewer + groups * pp, kind)
        if _agrees(twice, found.with_groups(groups, pp), of_stages, delay):
            return found
        groups *= 2
    return None


def _agrees(shape: Shape, ends: Array, of_stages: Array, delay: float) -> bool:
    """Whether every pass ends when it must, after what it waits for."""
    previous, inputs, sent = neighbours(shape)
    found = np.append(ends, 0.0)  # the last: what needs no input
    starts = np.maximum(found[previous], found[inputs] + np.where(sent, delay, 0.0))
    off = np.abs(starts + np.repeat(of_stages, shape.microbatches) - ends).max()
    return bool(off <= SAME * ends.max())


def _ends_of_one(shape: Shape, of_stages: Array, delay: float) -> Array:
    """When each pass ends, (pass,), for the time that a pass of each stage takes, (kind and stage,)."""
    short = _repeated(shape, of_stages, delay)
    if short is None:
        return _one_by_one(shape, of_stages, delay)
    return short.with_groups(short.left_out(shape), shape.pp)


def _one_by_one(shape: Shape, of_stages: Array, delay: float) -> Array:
    """The same pass by pass: every rank goes on as far as its inputs are there."""
    durations = np.repeat(of_stages, shape.microbatches).tolist()
    ends = [-1.0] * len(durations) + [0.0]  # the last: what needs no input
    steps = [zip(of.passes.tolist(), of.inputs.tolist(), of.sent.tolist(), strict=True) for of in orders(shape)]
    waiting = [next(of_rank, None) for of_rank in steps]  # each rank's next pass, its input, and whether that is sent
    free = [0.0] * shape.pp
    while any(waiting):
        before = list(waiting)
        for rank, of_rank in enumerate(steps):
            now, step = free[rank], waiting[rank]
            while step is not None:
                here, need, sent = step
                arrives = ends[need]
                if arrives < 0:
                    break
                if sent:
                    arrives += delay
                if arrives > now:
                    now = arrives
                now += durations[here]
                ends[here] = now
                step = next(of_rank, None)
            free[rank], waiting[rank] = now, step
        if waiting == before:
            raise InternalError(f"the passes of {shape} wait for each other")
    return np.array(ends[:-1])


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
    previous, inputs, _ = neighbours(shape)
    level = _ends_of_one(shape, np.ones(2 * shape.pp * shape.vpp), 0.0).astype(np.int64)
    passes = np.argsort(level, kind="stable")
    place = np.empty(len(passes) + 1, np.int64)
    place[passes], place[-1] = np.arange(len(passes)), len(passes)
    before_each, input_each = place[previous[passes]], place[inputs[passes]]
    ends = np.cumsum(np.bincount(level)[1:]).tolist()
    slices = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return passes, [_Level(at, before_each[at], input_each[at]) for at in slices]


def ends_of_cases(shape: Shape, forward: Array, backward: Array, delay: Any) -> Array:
    """When each pass ends, (pass, case), for times (stage, case) of a schedule whose backward pass is whole.

    ``delay``: one, or (case,).
    """
    of_stages = np.concatenate((forward, backward))
    if of_stages.shape[1] == 1:
        return _ends_of_one(shape, of_stages[:, 0], float(np.ravel(delay)[0]))[:, None]
    passes, levels = _levels(shape)
    lag = np.where(neighbours(shape)[2][passes, None], delay, 0.0)
    durations = np.repeat(of_stages, shape.microbatches, axis=0)[passes]
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
    kinds = (forward, backward) if weight is None else (forward, backward, weight)
    ends = _ends_of_one(shape, np.concatenate(kinds), delay)
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
    of_stages = np.frombuffer(forward + backward + weight)
    short = _repeated(shape, of_stages, delay)
    if short is None:
        return float(_one_by_one(shape, of_stages, delay).max())
    return float(short.ends.max() + short.a_group * short.left_out(shape))
