"""Orders of passes that split the backward pass: input gradients (B) at once, weight gradients (W) to fill waiting.

Three schedules, as PyTorch's torch.distributed.pipelining builds them: ``zero-bubble`` (InterleavedZeroBubble, ZB1P
where a rank has one stage), ``zbv`` (ZBVZeroBubble) and ``dualpipev`` (DualPipeV). In the last two a rank holds two
stages placed in a V: rank r stages r and 2*pp-1-r, so the first rank has the first and the last one.

What PyTorch's runtime does, and so what is modelled:

* A whole backward pass is B and W at once; its input gradient is sent when both are done.
* DualPipeV's overlapped pairs run one after the other on one stream, a forward pass and then a whole backward pass, and
  both outputs are sent after the second. Only a custom function could overlap them; torchtitan's trainer has none.
* The first stage has no input to differentiate: its B does nothing and its W is the whole backward pass.
* The activations of a pass are kept until its W; between B and W the output gradients of all weights are kept as well.

Source: Qi et al. 2023 (zero bubble); DeepSeek-AI 2024 (DualPipe); PyTorch 2.13, distributed/pipelining/schedules.py:
``_get_1f1b_rank_ops``, ``_calculate_single_rank_operations``, ``_add_send_recv``; stage.py: ``backward_one_chunk``,
``backward_weight_one_chunk``; _backward.py: ``stage_backward_input`` retains the graph.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parsolve.functions import Array
from parsolve.specs.workload import FOLDED

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)


class Sequence(NamedTuple):
    """One rank's passes in order, arrays (pass,): kind, chunk of the rank, microbatch.

    ``sent_after`` is the place of the pass after whose end the output of this one is sent.
    """

    kind: Array
    chunk: Array
    microbatch: Array
    sent_after: Array


def rounds(pp: int, microbatches: int) -> int:
    """Groups into which an interleaved zero-bubble schedule divides its microbatches, as few as are not below pp."""
    return max(1, microbatches // pp)


def legal_microbatches(kind: str, pp: int, microbatches: int) -> int:
    """The least number from ``microbatches`` on for which the schedule is defined."""
    if kind == "dualpipev":
        return max(microbatches, 2 * pp)
    if kind == "zero-bubble" and microbatches % rounds(pp, microbatches):
        return legal_microbatches(kind, pp, microbatches + 1)
    return microbatches


def saturated_microbatches(kind: str, pp: int, microbatches: int) -> int:
    """A number of microbatches with which every rank holds as much as with ``microbatches``: a few groups."""
    if kind == "zero-bubble":
        groups = rounds(pp, microbatches)
        return microbatches // groups * min(groups, 3)
    return min(microbatches, 4 * pp)


@lru_cache(maxsize=1024)
def sequence(kind: str, pp: int, vpp: int, microbatches: int, rank: int) -> Sequence:
    """The passes of one rank; ``vpp`` is 2 where the stages are placed in a V."""
    if kind == "zero-bubble":
        return _interleaved(pp, vpp, microbatches, rank)
    made = _zbv(pp, microbatches, rank) if kind == "zbv" else _dualpipev(pp, microbatches, rank)
    return made.sequence(microbatches)


def _interleaved(pp: int, vpp: int, m: int, rank: int) -> Sequence:
    """Warm-up forwards, then one forward, one B; W follows in the order of the Bs, ``rank`` of them behind.

    Source: ``_get_warmup_ops`` with a factor of 1, ``num_1f1b_microbatches = rank``.
    """
    size, total = m // rounds(pp, m), m * vpp
    at = np.arange(total)
    chunk, member = at // size % vpp, at // (size * vpp) * size + at % size
    warmup = min((vpp - 1) * size + pp - 1 - rank, total)
    step = np.concatenate((3 * at, 3 * (warmup + at) + 1, 3 * (warmup + at + rank) + 2))
    order = np.argsort(step)
    kind = np.repeat([FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT], total)
    chunks = np.concatenate((chunk, vpp - 1 - chunk, vpp - 1 - chunk))
    return Sequence(kind[order], chunks[order], np.tile(member, 3)[order], np.arange(3 * total))


class _Passes:
    """Passes put down one after the other; each kind takes the microbatches of a chunk in turn."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self.next: dict[tuple[int, int], int] = {}
        self.waiting: deque[int] = deque()

    def add(self, kind: int, chunk: int, later: int = 0) -> None:
        """One pass, whose output is sent ``later`` passes after it."""
        microbatch = self.next.get((kind, chunk), 0)
        self.next[kind, chunk] = microbatch + 1
        self.rows.append((kind, chunk, microbatch, len(self.rows) + later))

    def forward(self, chunk: int) -> None:
        """F."""
        self.add(FORWARD, chunk)

    def inputs(self, chunk: int) -> None:
        """B, its W for later."""
        self.add(INPUT_GRADIENT, chunk)
        self.waiting.append(chunk)

    def weights(self) -> None:
        """The W that waits longest, if any does."""
        if self.waiting:
            self.add(WEIGHT_GRADIENT, self.waiting.popleft())

    def backward(self, chunk: int) -> None:
        """B and W at once."""
        self.add(INPUT_GRADIENT, chunk, 1)
        self.add(WEIGHT_GRADIENT, chunk)

    def pair(self, forward: int, backward: int) -> None:
        """An overlapped pair: F, then B and W, and only then are their outputs sent."""
        self.add(FORWARD, forward, 2)
        self.backward(backward)

    def sequence(self, microbatches: int) -> Sequence:
        """Without the passes of microbatches that there are not."""
        kind, chunk, microbatch, sent_after = np.array(self.rows, dtype=np.int64).T
        kept = microbatch < microbatches
        place = np.cumsum(kept) - 1
        return Sequence(kind[kept], chunk[kept], microbatch[kept], place[sent_after[kept]])


def _zbv(pp: int, microbatches: int, rank: int) -> _Passes:
    """ZBVZeroBubble, built for 2*pp-1 microbatches at least."""
    made, total = _Passes(), max(2 * pp - 1, microbatches)

    def together(chunk: int) -> None:
        made.add(INPUT_GRADIENT, chunk)
        made.add(WEIGHT_GRADIENT, chunk)

    def left(chunk: int) -> bool:
        return made.next.get((FORWARD, chunk), 0) < total

    for _ in range(2 * (pp - rank) - 1):
        made.forward(0)
    for _ in range(rank):
        made.forward(1)
        made.forward(0)
    for _ in range(pp - rank):
        made.forward(1)
        together(1)
    while left(1):
        if left(0):
            made.forward(0)
        together(0)
        made.forward(1)
        together(1)
    for _ in range(rank):
        made.add(INPUT_GRADIENT, 0)
        made.add(INPUT_GRADIENT, 1)
    for _ in range(pp - rank):
        together(0)
    for chunk in (1, 0):
        while made.next[WEIGHT_GRADIENT, chunk] < total:
            made.add(WEIGHT_GRADIENT, chunk)
    return made


def _dualpipev(pp: int, microbatches: int, rank: int) -> _Passes:
    """DualPipeV in its eight steps; 2*pp microbatches at least."""
    made, behind = _Passes(), pp - 1 - rank
    for _ in range(2 * behind):
        made.forward(0)
    for _ in range(rank + 1):
        made.forward(0)
        made.forward(1)
    for _ in range(behind):
        made.inputs(1)
        made.weights()
        made.forward(1)
    for step in range(microbatches - 2 * pp + rank + 1):
        if step == 0 and behind == 0:
            made.forward(0)
            made.backward(1)
        else:
            made.pair(0, 1)
        made.pair(1, 0)
    for _ in range(behind):
        made.backward(1)
        made.pair(1, 0)
    for step in range(2 * (rank + 1)):  # chunks in turn; the second half splits the backward pass
        (made.inputs if step > rank else made.backward)(1 - step % 2)
    for _ in range(behind):
        made.weights()
        made.inputs(0)
    for _ in range(rank + 1):
        made.weights()
    return made


@lru_cache(maxsize=1024)
def moments(kind: str, pp: int, vpp: int, microbatches: int, rank: int) -> tuple[tuple[Array, Array], ...]:
    """Microbatches that a rank holds, of each phase two arrays (moment, chunk) with the moments that matter.

    The first: those whose weight gradients are not made. The second: of these, those whose input gradients are; none of
    the first stage, whose input needs no gradient. In a V the moments fall into two phases, while no more than one
    microbatch of a chunk waits like that and while more do: what is held is most in the one, what waits in the other.
    Else there is one phase: both are most at the same time.
    """
    one = sequence(kind, pp, vpp, microbatches, rank)
    of_chunk = one.chunk[:, None] == np.arange(vpp)
    begins, turns, ends = (one.kind == what for what in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT))
    first = (one.chunk == 0) & (rank == 0)
    held = np.cumsum((begins.astype(np.int64) - ends)[:, None] * of_chunk, axis=0)
    waiting = np.cumsum(((turns.astype(np.int64) - ends) * ~first)[:, None] * of_chunk, axis=0)
    phase = (waiting.sum(axis=1) > 1) if kind in FOLDED else np.zeros(len(held), bool)
    return tuple((_most(held[phase == i]), _most(waiting[phase == i])) for i in range(1 + (kind in FOLDED)))


def _most(amounts: Array) -> Array:
    """The rows (moment, chunk) that no other row exceeds in every chunk; a row of zeros where there are none."""
    if not len(amounts):
        return np.zeros((1, amounts.shape[1]), np.int64)
    rows = np.unique(amounts, axis=0)
    if len(rows) > MOST_MOMENTS:
        return rows
    covered = np.all(rows[:, None] <= rows[None], axis=2) & ~np.eye(len(rows), dtype=bool)
    return np.asarray(rows[~covered.any(axis=1)])


MOST_MOMENTS = 2000
"""Up to so many distinct moments are compared with each other."""
