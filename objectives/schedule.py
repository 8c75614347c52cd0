"""The order of a pipeline schedule's passes, and what each rank holds in it.

Stage ``s`` of ``pp*vpp`` in model order is chunk ``s // pp`` of rank ``s % pp``, or of rank ``pp-1 - s % pp`` for odd
chunks where the stages are placed in a V. Every rank runs its passes in the schedule's fixed order; a pass starts when
its rank is free and its input has arrived.
Source: Narayanan et al. 2021, section 2.2; Megatron-Core's schedules.py (interleaving in groups of pp microbatches);
Huang et al. 2019 (GPipe).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parsolve.functions import Array
from parsolve.objectives import split_backward
from parsolve.objectives.split_backward import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from parsolve.specs.workload import FOLDED, SPLIT_BACKWARD
from parsolve.splits import ranks_in_model_order

MANY_MOMENTS = 256
"""Of more moments than this, ``held`` compares neighbours alone."""


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


def chunk_order(shape: Shape) -> tuple[Array, Array]:
    """(chunk, microbatch) of a rank's forward passes; backward passes take the chunks in reverse."""
    pp, vpp, m, _ = shape
    if vpp == 1:
        return np.zeros(m, np.int64), np.arange(m)
    groups, rest = divmod(m, pp)
    shape_of_groups = (groups, vpp, pp)
    chunks = np.broadcast_to(np.arange(vpp)[:, None], shape_of_groups).ravel()
    members = np.broadcast_to(np.arange(groups * pp).reshape(groups, 1, pp), shape_of_groups).ravel()
    last_chunks, last_members = np.repeat(np.arange(vpp), rest), np.tile(np.arange(m - rest, m), vpp)
    return np.concatenate((chunks, last_chunks)), np.concatenate((members, last_members))


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
    chunk, member = chunk_order(shape)
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


@lru_cache(maxsize=64)
def neighbours(shape: Shape) -> tuple[Array, Array, Array]:
    """For each pass: the one before it on its rank, its input, and whether that is sent; -1: none."""
    size = (2 + shape.splits_backward) * shape.pp * shape.vpp * shape.microbatches
    previous, inputs, sent = np.full(size, -1), np.full(size, -1), np.zeros(size, bool)
    for order in orders(shape):
        previous[order.passes[1:]] = order.passes[:-1]
        inputs[order.passes], sent[order.passes] = order.inputs, order.sent
    return previous, inputs, sent


def held_and_waiting(shape: Shape, rank: int) -> tuple[tuple[Array, Array], ...]:
    """What a rank holds in each phase; see ``split_backward.moments``. Of a whole backward pass nothing waits."""
    if not shape.splits_backward:
        return ((held(shape, rank), np.zeros((1, shape.vpp))),)
    return split_backward.moments(shape.kind, shape.pp, shape.vpp, shape.microbatches, rank)


@lru_cache(maxsize=8)
def _forward_passes(shape: Shape) -> Array:
    """(pass, chunk) how many of each chunk's forward passes a rank has made after so many in all."""
    chunk, _ = chunk_order(shape)
    return np.asarray(np.cumsum(chunk[:, None] == np.arange(shape.vpp), axis=0))


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
    first, total = warmup(shape, rank), m * vpp
    done = _forward_passes(shape)
    if first == total:
        return done[-1:]
    period = min(total - first, pp * vpp)
    moments = done[first : first + period].copy()
    moments[1:] -= done[: period - 1, ::-1]  # backward passes take the chunks in reverse
    if period > MANY_MOMENTS:  # of the others only those next to each other are compared: more are kept than need be
        falls, rises = (np.all(np.diff(moments, axis=0) * sign >= 0, axis=1) for sign in (-1, 1))
        covered = np.append(rises & ~falls, False) | np.append(False, falls)
        return np.asarray(moments[~covered])
    at_most = np.all(moments[:, None, :] <= moments[None, :, :], axis=2)
    earlier = np.tri(period, k=-1, dtype=bool)
    covered = at_most & (~at_most.T | earlier)
    return np.asarray(moments[~covered.any(axis=1)])
