"""Cuts that are worth trying first: good plans early are what the search over all cuts is bounded by.

Stages alike but for the first and the last, which hold the embedding and the output layer. Of each configuration the
one that looks best is found for all configurations of one schedule at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parsolve.functions import Array
from parsolve.objectives.schedule import Shape, shape_of
from parsolve.objectives.schedule_paths import long_paths, stacked
from parsolve.objectives.step_time import Items, pass_times
from parsolve.optimizer.best_cut import Paths
from parsolve.optimizer.cut_forms import Contents, Forms, Row, cost_at, is_legal, on_path
from parsolve.problem import Instance
from parsolve.splits import bounds, rank_cuts

FEWER = 1
"""The first and the last stage hold so many layers fewer than the even share, or one more, or none."""


@lru_cache(maxsize=256)
def likely_cuts(num_layers: int, pp: int, vpp: int, mtp_apart: bool = False) -> Array:
    """Cuts of the stated domain (``splits.rank_cuts``) of several ranks, (cut, stage) in model order."""
    even, stages = num_layers // (pp * vpp), pp * vpp - mtp_apart  # with modules apart the last stage holds none
    ends = np.unique([0, *range(max(0, even - FEWER), even + 2)])
    first, last = (grid.reshape(-1, 1) for grid in np.meshgrid(ends, ends, indexing="ij"))
    if stages == 2:
        first, last = ends[:, None], num_layers - ends[:, None]
    small, fuller = np.divmod(num_layers - first - last, max(1, stages - 2))
    none = np.zeros((len(first), int(mtp_apart)), np.int64)
    found: list[Array] = []
    for place in (np.arange(stages - 2), np.arange(stages - 2)[::-1]):  # the fuller stages first, or last
        tried = np.hstack((first, small + (place < fuller), last, none))
        found.append(_in_domain(tried, num_layers, pp, vpp, not found, mtp_apart))
    return np.array(sorted({tuple(cut) for cuts in found for cut in cuts.tolist()}), np.int64)


def _in_domain(cuts: Array, num_layers: int, pp: int, vpp: int, fuller_first: bool, mtp_apart: bool) -> Array:
    """Those of the cuts that ``splits.rank_cuts`` has, all ranks of one kind."""
    low, high = (of.T.ravel() for of in bounds(num_layers, pp, vpp, mtp_apart))
    cuts = cuts[np.all((cuts >= low) & (cuts <= high), axis=1)]
    of_ranks = [rank_cuts(num_layers, pp, vpp, rank, mtp_apart) for rank in range(pp)]
    known = {id(of): of.only(of.fuller_first if fuller_first else of.fuller_last) for of in of_ranks}  # most are one
    sizes = {name: set(map(tuple, of.sizes.tolist())) for name, of in known.items()}
    chunks = cuts.reshape(len(cuts), vpp, pp).transpose(0, 2, 1).tolist()
    names = [id(of) for of in of_ranks]
    inside = [all(tuple(of) in sizes[name] for of, name in zip(cut, names, strict=True)) for cut in chunks]
    return np.asarray(cuts[np.array(inside, dtype=bool)])


class Likely(NamedTuple):
    """A row with the legal likely cut that looks best for it; ``cost``: no more than it has, by the known paths."""

    cost: float
    row: int
    shape: Shape
    counts: tuple[int, ...]
    """Layers of each stage in model order."""


def most_promising(
    p: Instance, all_forms: Forms, times: Items, values: Mapping[str, Array], paths: Paths, look_at: int
) -> list[Likely]:
    """The rows that have a legal likely cut, the cheapest first.

    The first ``look_at`` by the paths known so far are put in order by long paths of their own, which become known.
    """
    found = [
        Likely(float(cost[i, at]), row, shape, tuple(cuts[at].tolist()))
        for shape, rows, cuts, cost in _all_costs(p, all_forms, times, values, paths)
        for i, (row, at) in enumerate(zip(rows.tolist(), cost.argmin(axis=1).tolist(), strict=True))
        if cost[i, at] < math.inf
    ]
    found.sort(key=_order)
    return sorted(
        [*_along_their_paths(p, all_forms, times, values, paths, found[:look_at]), *found[look_at:]], key=_order
    )


def _order(likely: Likely) -> tuple[float, int]:
    return (likely.cost, likely.row)


def _all_costs(
    p: Instance, all_forms: Forms, times: Items, values: Mapping[str, Array], paths: Paths
) -> Iterator[tuple[Shape, Array, Array, Array]]:
    """For each schedule its rows, its likely cuts, and (row, cut) what each costs by the known paths; inf: illegal."""
    schedules = np.stack([*(values[axis] for axis in ("pp", "vpp", "grad_acc")), p.splits.mtp_apart[values["split"]]])
    kinds, which = np.unique(schedules, axis=1, return_inverse=True)
    for i, (pp, vpp, grad_acc, mtp_apart) in enumerate(kinds.T.tolist()):
        cuts = likely_cuts(p.model.num_layers, pp, vpp, bool(mtp_apart))
        if not len(cuts):
            continue
        rows = np.flatnonzero(which.ravel() == i)
        many = Row.many(all_forms, times, shape_of(pp, vpp, grad_acc), rows)
        of = Contents.of(cuts, p.model.layer_is_moe, pp)
        outside, dense, moe = on_path(paths.of(many.shape), times.rows((rows, None, None)))
        lengths = outside + of.dense @ dense.swapaxes(1, 2) + of.moe @ moe.swapaxes(1, 2)
        yield many.shape, rows, cuts, np.where(is_legal(many, of), cost_at(many, of, lengths.max(axis=2)), np.inf)


def _along_their_paths(
    p: Instance,
    all_forms: Forms,
    times: Items,
    values: Mapping[str, Array],
    paths: Paths,
    found: list[Likely],
) -> Iterator[Likely]:
    """The same with the cost along a long path of each schedule, all cuts of a schedule at once."""
    of_shape: dict[Shape, list[Likely]] = {}
    for likely in found:
        of_shape.setdefault(likely.shape, []).append(likely)
    for shape, some in of_shape.items():
        rows = [Row.of(all_forms, times, values, likely.row) for likely in some]
        of = Contents.of(np.array([likely.counts for likely in some]), p.model.layer_is_moe, shape.pp)
        passes = [pass_times(row.items, of.dense[i], of.moe[i]) for i, row in enumerate(rows)]
        forward, backward = np.stack([each.forward for each in passes]), np.stack([each.backward for each in passes])
        delay = np.array([each.delay for each in passes])
        own = stacked(long_paths(shape, forward.T, backward.T, delay))
        paths.add(shape, own)
        lengths = own.length(forward, backward, delay)
        for i, (likely, row) in enumerate(zip(some, rows, strict=True)):
            yield likely._replace(cost=float(cost_at(row, of, lengths[i])[i]))
