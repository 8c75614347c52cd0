"""The exact length of a pipeline schedule: the longest path through its operations, and the paths that bound it.

Stage ``s`` of ``pp*vpp`` in model order is chunk ``s // pp`` of rank ``s % pp``. Every rank runs its forward and backward
passes in the schedule's fixed order; a pass starts when its rank is free and its input has arrived. The length is
therefore a maximum, over paths, of sums of pass times: convex and piecewise linear in them. ``critical_path`` gives the
path that decides, and the same path bounds every other cut of the same shape from below.
Source: Narayanan et al. 2021, section 2.2; Megatron-Core's schedules.py (interleaving in groups of pp microbatches);
Huang et al. 2019 (GPipe).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parsolve.functions import Array


class Shape(NamedTuple):
    """What fixes the order of all passes. ``kind``: ``1f1b`` (interleaved when vpp > 1) or ``gpipe``."""

    pp: int
    vpp: int
    microbatches: int
    kind: str = "1f1b"


@dataclass(frozen=True)
class Order:
    """One rank's passes in order: ``passes`` and ``inputs`` index the flat array of all passes.

    Forward of stage s, microbatch k is ``s*m + k``, its backward ``(S + s)*m + k``; input -1: none. ``sent`` is true
    where the input comes from another rank.
    """

    passes: Array
    inputs: Array
    sent: Array


def _chunk_order(shape: Shape) -> tuple[Array, Array]:
    """(chunk, microbatch) of a rank's forward passes; backward passes take the chunks in reverse."""
    pp, vpp, m, _ = shape
    if vpp == 1:
        return np.zeros(m, np.int64), np.arange(m)
    starts = np.arange(0, m, pp)
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
    pp, vpp, m, _ = shape
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


@lru_cache(maxsize=1024)
def held(shape: Shape, rank: int) -> Array:
    """Microbatches held for the backward pass at the moments that matter: array (moment, chunk).

    A moment is just after a forward pass; those at which some other moment holds at least as much of every chunk are
    left out.
    """
    pp, vpp, m, _ = shape
    is_forward = _is_forward(shape, rank)
    chunk, _ = _chunk_order(shape)
    change = np.zeros((len(is_forward), vpp), np.int64)
    change[np.flatnonzero(is_forward), chunk] = 1
    change[np.flatnonzero(~is_forward), vpp - 1 - chunk] = -1
    moments = np.unique(np.cumsum(change, axis=0)[is_forward], axis=0)
    if vpp == 1:
        return moments[-1:]
    covered = (moments[:, None, :] <= moments[None, :, :]).all(axis=2)
    np.fill_diagonal(covered, False)
    return moments[~covered.any(axis=1)]


def _ends(shape: Shape, forward: Array, backward: Array, delay: float) -> Array:
    """When each pass ends, flat. Sweeps over the ranks from below until nothing changes: the least fixed point."""
    m = shape.microbatches
    durations = np.repeat(np.concatenate((forward, backward)), m)
    ends = np.append(np.zeros(2 * len(forward) * m), 0.0)
    prepared = []
    for order in orders(shape):
        own = durations[order.passes]
        done = np.cumsum(own)
        prepared.append((order, done, done - own, np.where(order.sent, delay, 0.0)))
    there_and_back = [*range(shape.pp), *range(shape.pp - 2, -1, -1)]
    while True:
        before = ends.copy()
        for rank in there_and_back:
            order, done, started, lag = prepared[rank]
            waited = np.maximum.accumulate(ends[order.inputs] + lag - started)
            ends[order.passes] = done + np.maximum(waited, 0.0)
        if np.array_equal(before, ends):
            return ends[:-1]


def makespan(shape: Shape, forward: Array, backward: Array, delay: float = 0.0) -> float:
    """Length of the schedule, s.

    Parameters
    ----------
    forward, backward: (pp*vpp,) time of one microbatch on each stage in model order, s.
    delay: time from the end of a pass until its output is on the next rank, during which both may compute, s.
    """
    return _makespan(shape, forward.tobytes(), backward.tobytes(), delay)


@lru_cache(maxsize=4096)
def _makespan(shape: Shape, forward: bytes, backward: bytes, delay: float) -> float:
    return float(_ends(shape, np.frombuffer(forward), np.frombuffer(backward), delay).max())


class Path(NamedTuple):
    """A path through the schedule: how many passes of each stage lie on it, and how many transfers."""

    forward: Array
    backward: Array
    transfers: int

    def length(self, forward: Array, backward: Array, delay: float = 0.0) -> float:
        """Sum of its passes; never above the makespan of the same shape, whatever the times."""
        return float(self.forward @ forward + self.backward @ backward + self.transfers * delay)


def critical_path(shape: Shape, forward: Array, backward: Array, delay: float = 0.0) -> tuple[float, Path]:
    """The makespan and the longest path."""
    m, stages = shape.microbatches, shape.pp * shape.vpp
    ends = _ends(shape, forward, backward, delay)
    durations = np.repeat(np.concatenate((forward, backward)), m)
    previous = np.full(len(ends), -1)
    inputs = np.full(len(ends), -1)
    sent = np.zeros(len(ends), bool)
    for order in orders(shape):
        previous[order.passes[1:]] = order.passes[:-1]
        inputs[order.passes], sent[order.passes] = order.inputs, order.sent
    at = int(np.argmax(ends))
    on_path: list[int] = []
    transfers = 0
    while at >= 0:
        on_path.append(at)
        start = ends[at] - durations[at]
        source, own = int(inputs[at]), int(previous[at])
        arrives = ends[source] + (delay if sent[at] else 0.0) if source >= 0 else -1.0
        free = ends[own] if own >= 0 else -1.0
        if source >= 0 and arrives >= free:
            transfers += bool(sent[at])
            at = source
        else:
            at = own
        assert at < 0 or start >= -1e-12
    counts = np.bincount(np.asarray(on_path) // m, minlength=2 * stages)
    return float(ends.max()), Path(counts[:stages], counts[stages:], transfers)
