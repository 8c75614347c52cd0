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


@lru_cache(maxsize=64)
def _steps(shape: Shape) -> list[list[tuple[int, int, bool]]]:
    """For each rank its passes in order: pass, input, and whether that is sent."""
    return [
        list(zip(order.passes.tolist(), order.inputs.tolist(), order.sent.tolist(), strict=True))
        for order in orders(shape)
    ]


def _ends_of_one(shape: Shape, of_stages: Array, delay: float) -> Array:
    """When each pass ends, (pass,), for the time that a pass of each stage takes, (kind and stage,)."""
    pp, _, m, kind = shape
    groups = FEW_GROUPS
    while kind == "1f1b" and 2 * groups * pp <= m:
        ends = _by_repetition(shape, of_stages, delay, groups)
        if ends is not None:
            return ends
        groups *= 2
    return _one_by_one(shape, of_stages, delay)


def _by_repetition(shape: Shape, of_stages: Array, delay: float, groups: int) -> Array | None:
    """The same from a schedule of fewer groups of pp microbatches, whose middle group is put in again and again.

    Every pass so placed is held against what it waits for in the whole schedule. As passes wait for each other in no
    circle, there is one answer only, and what agrees everywhere is that answer. None where it does not agree: the
    ranks are not in step yet when the middle group comes.
    """
    pp, vpp, m, kind = shape
    fewer = groups * pp + m % pp
    ends = _one_by_one(Shape(pp, vpp, fewer, kind), of_stages, delay).reshape(-1, fewer)
    before, after, times = groups // 2 * pp, (groups // 2 + 1) * pp, m // pp - groups
    a_group = ends[0, after] - ends[0, before]
    which = np.concatenate((np.arange(after), np.tile(np.arange(before, after), times), np.arange(after, fewer)))
    later = np.concatenate((np.zeros(after), np.repeat(np.arange(times) + 1, pp), np.full(fewer - after, times)))
    found = np.append(ends[:, which] + a_group * later, 0.0)  # the last: what needs no input
    previous, inputs, sent = neighbours(shape)
    starts = np.maximum(found[previous], found[inputs] + np.where(sent, delay, 0.0))
    off = np.abs(starts + np.repeat(of_stages, m) - found[:-1]).max()
    return found[:-1] if off <= SAME * found.max() else None


def _one_by_one(shape: Shape, of_stages: Array, delay: float) -> Array:
    """The same pass by pass: every rank goes on as far as its inputs are there."""
    durations = np.repeat(of_stages, shape.microbatches).tolist()
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
    return float(_ends_of_one(shape, np.frombuffer(forward + backward + weight), delay).max())
