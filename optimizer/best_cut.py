"""The best free cut of one configuration: layers to chunks, exactly, by cutting planes.

The master, a list of cuts or a CP-SAT model, holds only paths through the schedule met so far. Each solution is
evaluated exactly and its critical path added, which is valid for every cut; when no solution is left below the best
exact value that value is proven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from parsolve.objectives.schedule import Shape
from parsolve.objectives.schedule_length import makespan
from parsolve.objectives.schedule_paths import Path, critical_path, long_paths, plain_paths, stacked
from parsolve.objectives.step_time import pass_times
from parsolve.optimizer.cut_forms import SLACK, Contents, Row, cost_at, is_legal
from parsolve.optimizer.cut_list import CutList, ShapeCuts
from parsolve.optimizer.cut_model import CutModel
from parsolve.problem import Instance
from parsolve.splits import Layers, from_model_order

AT_FIRST, AT_ONCE = 4, 32
"""Known paths that a list of cuts is held against at once: a few first, which leave little of a long list."""


@dataclass
class Paths:
    """Paths met so far, by schedule: they bound every cut of every configuration with that schedule."""

    known: dict[Shape, Path] = field(default_factory=dict)

    def of(self, shape: Shape) -> Path:
        """Stacked; to begin with, those that every schedule has."""
        if shape not in self.known:
            self.known[shape] = Path(*(np.concatenate(columns) for columns in zip(*plain_paths(shape), strict=True)))
        return self.known[shape]

    def add(self, shape: Shape, paths: Path) -> None:
        """Remember stacked paths, each once."""
        known = self.of(shape)
        both = [np.concatenate(pair) for pair in zip(known, paths, strict=True)]
        _, first = np.unique(np.column_stack(both), axis=0, return_index=True)
        self.known[shape] = Path(*(column[np.sort(first)] for column in both))


@dataclass
class Found:
    """The best cut of a row below the value to beat, if any; ``proven`` unless the time ran out."""

    layers: Layers | None
    cost: float
    proven: bool


def best_cut(
    p: Instance,
    row: Row,
    to_beat: float,
    paths: Paths,
    cuts: ShapeCuts,
    i: int,
    confirm: Callable[[Layers], bool],
    deadline: float = math.inf,
) -> Found:
    """The cheapest legal cut of a row, the ``i``-th of ``cuts``, that costs less than ``to_beat``, with proof.

    ``confirm``: whether a cut is legal to the last byte; the linear forms leave room for their rounding.
    """
    master = _master(p, row, to_beat, paths, cuts, i)
    best: Layers | None = None
    cost = to_beat
    while master is not None:
        left = None if deadline == math.inf else deadline - time.perf_counter()
        if left is not None and left <= 0:
            return Found(best, cost, False)
        candidates, finished = master.solve(left)
        if not len(candidates):
            return Found(best, cost, finished)
        of = Contents.of(candidates, p.model.layer_is_moe, row.shape.pp)
        forward, backward, delay, _ = pass_times(row.items, of.dense, of.moe)
        found = long_paths(row.shape, forward.T, backward.T, delay)
        lengths = stacked(found).length(forward, backward, delay)
        promised = np.where(is_legal(row, of), cost_at(row, of, lengths), np.inf)
        for k, counts in enumerate(candidates.tolist()):
            if promised[k] >= cost * (1 - SLACK):
                continue
            length = makespan(row.shape, forward[k], backward[k], delay)
            if length > lengths[k] * (1 + SLACK):
                found[k] = critical_path(row.shape, forward[k], backward[k], delay)[1]
            value = float(cost_at(row, of, length)[k])
            layers = from_model_order(counts, row.shape.pp)
            if value < cost * (1 - SLACK) and confirm(layers):
                best, cost = layers, value
                master.improve(cost)
        master.forbid()
        paths.add(row.shape, stacked(found))
        master.add_paths(stacked(found))
    return Found(None, to_beat, True)


def _master(p: Instance, row: Row, to_beat: float, paths: Paths, cuts: ShapeCuts, i: int) -> CutList | CutModel | None:
    """The row's cuts as a list, else as a model; None when there is none."""
    known = paths.of(row.shape)
    if cuts.chosen is not None:
        master = CutList(p, row, to_beat, cuts, i)
        end, at_once = len(known.transfers), AT_FIRST
        while end > 0 and len(master.length):  # the last met exclude most
            master.add_paths(Path(*(column[max(0, end - at_once) : end] for column in known)))
            end, at_once = end - at_once, AT_ONCE
        return master if len(master.length) else None
    options = cuts.domains.alone(i).options
    if not all(len(of.total) for of in options):
        return None
    model = CutModel(p, row, to_beat, options)
    model.add_paths(known)
    return model
