"""Cuts that are worth trying first: good plans early are what the search over all cuts is bounded by.

Stages alike but for the first and the last, which hold the embedding and the output layer. Of each configuration the
one that looks best is found for all configurations of one schedule at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from parsolve.functions import Array
from parsolve.objectives.schedule import shape_of
from parsolve.objectives.step_time import Items
from parsolve.optimizer.best_cut import Paths
from parsolve.optimizer.cut_forms import Contents, Forms, Row, cost_at, is_legal, on_path
from parsolve.problem import Instance
from parsolve.splits import Layers, bounds, from_model_order, rank_cuts

FEWER = 1
"""The first and the last stage hold so many layers fewer than the even share, or one more, or none."""


@lru_cache(maxsize=256)
def likely_cuts(num_layers: int, pp: int, vpp: int) -> Array:
    """Cuts of the stated domain (``splits.rank_cuts``) of several ranks, (cut, stage) in model order."""
    even = num_layers // (pp * vpp)
    ends = sorted({0, *range(max(0, even - FEWER), even + 2)})
    middle = np.arange(pp * vpp - 2)
    found: list[Array] = []
    for fuller_first in (True, False):
        tried = []
        for first, last in itertools.product(ends, ends) if len(middle) else ((n, num_layers - n) for n in ends):
            small, fuller = divmod(num_layers - first - last, max(1, len(middle)))
            of_middle = small + ((middle if fuller_first else middle[::-1]) < fuller)
            tried.append(np.concatenate(([first], of_middle, [last])))
        found.append(_in_domain(np.array(tried), num_layers, pp, vpp, fuller_first))
    return np.unique(np.concatenate(found), axis=0)


def _in_domain(cuts: Array, num_layers: int, pp: int, vpp: int, fuller_first: bool) -> Array:
    """Those of the cuts that ``splits.rank_cuts`` has, all ranks of one kind."""
    low, high = (of.T.ravel() for of in bounds(num_layers, pp, vpp))
    cuts = cuts[np.all((cuts >= low) & (cuts <= high), axis=1)]
    for rank in range(pp):
        known = rank_cuts(num_layers, pp, vpp, rank)
        known = known.only(known.fuller_first if fuller_first else known.fuller_last)
        sizes = set(map(tuple, known.sizes.tolist()))
        cuts = cuts[[tuple(chunks) in sizes for chunks in cuts[:, rank::pp].tolist()]]
    return cuts


def most_promising(
    p: Instance, all_forms: Forms, times: Items, values: Mapping[str, Array], paths: Paths
) -> list[tuple[float, int, Layers]]:
    """(cost, row, cut): for each row the legal likely cut that is cheapest by the known paths; the cheapest first."""
    found = []
    schedules = np.stack([values[axis] for axis in ("pp", "vpp", "grad_acc")])
    kinds, which = np.unique(schedules, axis=1, return_inverse=True)
    for i, (pp, vpp, grad_acc) in enumerate(kinds.T.tolist()):
        cuts = likely_cuts(p.model.num_layers, pp, vpp)
        if not len(cuts):
            continue
        rows = np.flatnonzero(which.ravel() == i)
        many = Row.many(all_forms, times, shape_of(pp, vpp, grad_acc), rows)
        of = Contents.of(cuts, p.model.layer_is_moe, pp)
        outside, dense, moe = on_path(paths.of(many.shape), times.rows((rows, None, None)))
        lengths = outside + of.dense @ dense.swapaxes(1, 2) + of.moe @ moe.swapaxes(1, 2)
        cost = np.where(is_legal(many, of), cost_at(many, of, lengths.max(axis=2)), np.inf)
        best = cost.argmin(axis=1)
        for row, at, value in zip(rows.tolist(), best.tolist(), cost[np.arange(len(rows)), best].tolist(), strict=True):
            if value < np.inf:
                found.append((value, row, from_model_order(cuts[at].tolist(), pp)))
    return sorted(found)
