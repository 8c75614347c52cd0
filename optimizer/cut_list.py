"""All cuts of one pipeline shape as a list, and of them those that one configuration may still take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from parsolve.functions import Array
from parsolve.objectives.schedule_paths import Path
from parsolve.optimizer.cut_caps import Domains, ShapeRows, at_least, domains, others, waits
from parsolve.optimizer.cut_forms import SLACK, Contents, Form, Row, cheapest, cost_at, fixed, is_legal, on_path
from parsolve.problem import Instance
from parsolve.splits import RankCuts, moe_layers

SPARSE = 0.3
"""Cuts out of the race are dropped from the list when they are at least this share of it."""
AT_ONCE = 8
"""Listed cuts evaluated in one round."""
LOOK = 256
"""Listed cuts whose limits are looked at in one round."""
LONG = 20_000
"""Of a list of cuts with more ranks than this in all, those whose time alone is too long are left out."""
MAX_LISTED = 3_000_000
"""Cuts are listed when they have no more stages than this in all."""


@dataclass(frozen=True)
class ShapeCuts:
    """The cuts that configurations of one pipeline shape may take.

    ``chosen``: (rank, cut) which option of each rank, None where they are too many; ``rest``: (row,) at least what all
    but the pipeline costs.
    """

    domains: Domains
    rest: Array
    chosen: Array | None

    @staticmethod
    def of(p: Instance, rows: ShapeRows) -> ShapeCuts:
        """The cuts with which some of the rows may cost less than it has to beat, within its caps."""
        rest = others(p, rows.forms, len(rows.beat), rows.pp, int(rows.least.min()), int(rows.most.max()))
        pipeline = rows.forms.pipeline
        room = None if pipeline is None else (rows.beat - rest) / pipeline.weight
        domain = domains(p, rows)
        patience = np.full((rows.pp, p.model.num_layers + 1), math.inf)
        if pipeline is not None and room is not None and all(len(cuts.total) for cuts in domain.options):
            patience = _patience(p, rows, pipeline, room)
        grow = partial(_grown, p.model.num_layers, patience)
        chosen = _combined(domain.options, grow)
        if room is not None and (chosen is None or chosen.size > LONG):
            domain = domain.in_time(p, rows, room)
            chosen = _combined(domain.options, grow)
        return ShapeCuts(domain, rest, chosen)

    def alone(self, p: Instance, i: int, row: Row, to_beat: float, paths: Path) -> ShapeCuts:
        """The same for row ``i`` alone, held against paths while they are put together: often few enough to list."""
        options = self.domains.alone(i)
        grow = partial(_grown_below, p, row, to_beat, float(self.rest[i]), paths)
        return ShapeCuts(options, self.rest[i : i + 1], _combined(options.options, grow))

    def of_row(self, i: int) -> Array:
        """(cut, stage) in model order: the listed cuts that one row may take."""
        assert self.chosen is not None
        left = np.arange(self.chosen.shape[1])
        for chosen, allowed in zip(self.chosen, self.domains.allowed, strict=True):
            left = left[allowed[i][chosen[left]]]
        sizes = [cuts.sizes[of[left]] for cuts, of in zip(self.domains.options, self.chosen, strict=True)]
        return np.stack(sizes, axis=2).reshape(len(left), -1 if len(left) else 0)


def _patience(p: Instance, rows: ShapeRows, pipeline: Form, room: Array) -> Array:
    """(rank, number) layers in first chunks of earlier ranks that a rank can wait for and still compute so many.

    The most of any row, each with ``room`` (row,) for its pipeline, s; below zero: it cannot.
    """
    units, pp = pipeline.units, rows.pp
    outside = fixed(units, pp, rows.values["grad_acc"]) + waits(units, pp)
    numbers = np.arange(p.model.num_layers + 1)[:, None, None]
    busy = outside[:, :, None] + np.moveaxis(at_least(p, units, numbers, pp, rows.vpp), 0, -1)
    left = (room * (1 + SLACK))[:, None, None] - busy
    ahead = np.broadcast_to(cheapest(p, units, "_ahead")[:, None, None], left.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        patient = np.where(ahead > 0, np.floor(left / ahead + 1e-6), np.inf)
    return np.asarray(np.where(left >= 0, patient, -1.0).max(axis=0))


def _combined(of_ranks: Sequence[RankCuts], grow: Callable[[list[RankCuts]], Array | None]) -> Array | None:
    """(rank, cut) options of one kind on all ranks that ``grow`` puts together; None: too many."""
    if not all(len(cuts.total) for cuts in of_ranks):
        return np.zeros((len(of_ranks), 0), np.int32)
    found = []
    level = [cuts.fuller_first & cuts.fuller_last for cuts in of_ranks]
    for fuller_first in (True, False):
        if not fuller_first and all(one.all() for one in level):
            break
        options = [np.flatnonzero(cuts.fuller_first if fuller_first else cuts.fuller_last) for cuts in of_ranks]
        if not all(map(len, options)):
            continue
        chosen = grow([cuts.only(i) for cuts, i in zip(of_ranks, options, strict=True)])
        if chosen is None:
            return None
        chosen = np.stack([of[which] for of, which in zip(options, chosen, strict=True)]).astype(np.int32)
        if not fuller_first:  # what is level on all ranks is known
            chosen = chosen[:, ~np.all([one[which] for one, which in zip(level, chosen, strict=True)], axis=0)]
        found.append(chosen)
    return np.concatenate(found, axis=1) if found else np.zeros((len(level), 0), np.int32)


def _grown(layers: int, patience: Array, options: list[RankCuts]) -> Array | None:
    """The combinations of one kind, (rank, cut), rank after rank."""
    chosen, sums, ahead = np.zeros((0, 1), np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64)
    least = [int(cuts.total.min()) for cuts in options]
    most = [int(cuts.total.max()) for cuts in options]
    stages = sum(cuts.sizes.shape[1] for cuts in options)
    for rank, cuts in enumerate(options):
        if len(sums) * len(cuts.total) > MAX_LISTED:
            return None
        grown = sums[:, None] + cuts.total
        keep = (grown + sum(least[rank + 1 :]) <= layers) & (grown + sum(most[rank + 1 :]) >= layers)
        keep &= ahead[:, None] <= patience[rank, cuts.total]
        left, right = np.nonzero(keep)
        if len(left) * stages > MAX_LISTED:
            return None
        chosen = np.vstack((chosen[:, left], right[None, :].astype(np.int32)))
        sums, ahead = grown[left, right], ahead[left] + cuts.sizes[right, 0]
    return chosen


def _grown_below(
    p: Instance, row: Row, to_beat: float, rest: float, paths: Path, options: list[RankCuts]
) -> Array | None:
    """The combinations of one kind with which no path is too long for a row that is to cost less than ``to_beat``.

    A path's length is a sum over the ranks. With any price ``c`` a layer it is c * layers + the sum of what each rank's
    layers cost above that price, and of the ranks still open no more than their cheapest options count.
    """
    layers, pp = p.model.num_layers, len(options)
    outside, of_stage = _along(p, row, paths, options)
    totals = [cuts.total for cuts in options]
    # (option, path) of each rank
    lengths = [cuts.sizes.astype(float) @ of_stage[:, rank::pp].T for rank, cuts in enumerate(options)]
    price, bound = _prices(lengths, totals, layers)
    above = [length - total[:, None] * price for length, total in zip(lengths, totals, strict=True)]
    longest = (to_beat - rest) / row.weight * (1 + SLACK) if row.weight else math.inf
    room = longest - outside - bound  # beyond the cheapest options of all ranks
    if np.any(room < 0):
        return np.zeros((pp, 0), np.int32)
    above = [each - each.min(axis=0) for each in above]
    least = np.append(np.cumsum([total.min() for total in totals[::-1]])[::-1], 0)
    most = np.append(np.cumsum([total.max() for total in totals[::-1]])[::-1], 0)
    chosen, sums, spent = np.zeros((0, 1), np.int32), np.zeros(1, np.int64), np.zeros((1, len(outside)))
    for rank, (total, each) in enumerate(zip(totals, above, strict=True)):
        grown = sums[:, None] + total
        left, right = np.nonzero((grown + least[rank + 1] <= layers) & (grown + most[rank + 1] >= layers))
        if len(left) * max(len(outside), row.shape.pp * row.shape.vpp) > MAX_LISTED:
            return None
        spent = spent[left] + each[right]
        keep = np.all(spent <= room, axis=1)
        left, right, spent = left[keep], right[keep], spent[keep]
        chosen = np.vstack((chosen[:, left], right[None, :].astype(np.int32)))
        sums = sums[left] + total[right]
    return chosen


def _along(p: Instance, row: Row, paths: Path, options: list[RankCuts]) -> tuple[Array, Array]:
    """(path,) what paths take at least beside layers of the commoner kind, and (path, stage) what one of these adds.

    Layers of the other kind count as of the commoner, less what they can save at most on the stages that they reach.
    """
    outside, *of_kinds = on_path(paths, row.items)
    is_moe = np.array(p.model.layer_is_moe)
    common = int(2 * is_moe.sum() >= len(is_moe))
    rare = np.flatnonzero(is_moe != common)
    if not len(rare):
        return outside, of_kinds[common]
    low, high = (np.stack([find(cuts.sizes, axis=0) for cuts in options], axis=1).ravel() for find in (np.min, np.max))
    first, last = np.cumsum(low) - low, np.cumsum(high)  # the layers that a stage can have begin and end there
    reached = np.any((first[:, None] <= rare) & (rare < last[:, None]), axis=1)
    saved = of_kinds[common] - of_kinds[1 - common]
    return outside - len(rare) * saved[:, reached].max(axis=1, initial=-math.inf), of_kinds[common]


def _prices(lengths: list[Array], totals: list[Array], layers: int) -> tuple[Array, Array]:
    """(path,) of some prices a layer the one with the highest bound on a path's length, and that bound."""
    best, bound = np.zeros(lengths[0].shape[1]), np.full(lengths[0].shape[1], -math.inf)
    slopes = [np.zeros(lengths[0].shape[1])]
    for length, total in zip(lengths, totals, strict=True):
        spread = int(total[-1] - total[0])  # options stand in the order of their totals
        if spread:
            slopes.append((length[-1] - length[0]) / spread)
    for price in slopes:
        at_least = [
            (length - total[:, None] * price).min(axis=0) for length, total in zip(lengths, totals, strict=True)
        ]
        value = price * layers + sum(at_least)
        better = value > bound
        best, bound = np.where(better, price, best), np.where(better, value, bound)
    return best, bound


class CutList:
    """Cuts of one row with the longest of the known paths of each, and at least what the other terms cost.

    ``exact``: those whose other terms are known and whose limits hold; that is looked at for the cheapest only.
    """

    def __init__(self, p: Instance, row: Row, to_beat: float, cuts: ShapeCuts, i: int) -> None:
        self.row, self.to_beat = row, to_beat
        self.layer_is_moe = p.model.layer_is_moe
        self.counts = cuts.of_row(i)
        self.weight = row.weight
        self.length = np.zeros(len(self.counts))
        self.rest = np.full(len(self.counts), float(cuts.rest[i]))
        self.exact = np.zeros(len(self.counts), dtype=bool)
        self.alive = np.ones(len(self.counts), dtype=bool)
        self.given: Array = np.zeros(0, np.int64)

    def add_paths(self, paths: Path) -> None:
        """The schedule is at least as long as each of these stacked paths."""
        if not self.weight or not len(self.length):
            return
        lengths, dense, moe = on_path(paths, self.row.items)
        of_moe = moe_layers(self.counts, self.layer_is_moe)
        for layers, each in ((self.counts - of_moe, dense), (of_moe, moe)):
            if each.any():
                lengths = lengths + layers.astype(float) @ each.T
        self.length = np.maximum(self.length, lengths.max(axis=1))
        self._drop(SPARSE)

    def _drop(self, share: float) -> None:
        """Forget cuts that are out of the race, if they are at least so large a share."""
        keep = self.alive & (self.rest + self.weight * self.length < self.to_beat * (1 - SLACK))
        if int(keep.sum()) < (1 - share) * len(keep):
            for name in ("counts", "rest", "exact", "length"):
                setattr(self, name, getattr(self, name)[keep])
            self.alive = np.ones(int(keep.sum()), dtype=bool)
            self.given = np.zeros(0, np.int64)

    def improve(self, cost: float) -> None:
        """Only cuts that beat ``cost``."""
        self.to_beat = cost

    def forbid(self) -> None:
        """Not the last cuts again."""
        self.alive[self.given] = False

    def solve(self, time_limit: float | None) -> tuple[Array, bool]:
        """The cheapest cuts under the paths so far, (cut, stage); none when none is left that beats the cost."""
        while len(self.length):
            self._look()
            self._drop(0.0)
            known = np.flatnonzero(self.exact)
            if len(known):
                cost = self.rest[known] + self.weight * self.length[known]
                self.given = known[np.argsort(cost, kind="stable")[:AT_ONCE]]
                return self.counts[self.given], True
        return np.zeros((0, 0), np.int64), True

    def _look(self) -> None:
        """Take the other terms of the cheapest cuts exactly, and forget those that break a limit."""
        self._drop(0.0)
        cost = self.rest + self.weight * self.length
        here = np.argpartition(cost, LOOK)[:LOOK] if len(cost) > LOOK else np.arange(len(cost))
        here = here[~self.exact[here]]
        of = Contents.of(self.counts[here], self.layer_is_moe, self.row.shape.pp)
        self.rest[here] = cost_at(self.row, of, 0.0)
        self.alive[here] = is_legal(self.row, of)
        self.exact[here] = self.alive[here]
