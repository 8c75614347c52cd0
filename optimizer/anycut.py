"""All cuts of all configurations: which configurations could a cut bring onto the list, and which cut is their best.

The relaxed cuts (splits.free) give every configuration a bound below all its cuts; those within reach are joined. Rank
by rank ``cuts.caps`` then shows for most that no cut will do; ``cuts.best_cut`` solves the rest.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from parsolve.config import Config
from parsolve.evaluation import instance_for, objective_rows, objective_value, violations
from parsolve.functions import Array
from parsolve.objectives.step_time import items
from parsolve.optimizer.bounds import Filter
from parsolve.optimizer.cuts import Caps, Paths, Row, best_cut, caps, forms
from parsolve.optimizer.join import join
from parsolve.optimizer.tables import Table
from parsolve.problem import Instance

if TYPE_CHECKING:
    from parsolve.optimizer.ranking import _Search

MAX_ROWS = 1_000_000
"""Configurations joined at once; more than that are not proven."""
NO_BOUND = 1e3
"""Without any plan so far, cuts up to this many times the configuration's bound are looked for."""


class AnyCut:
    """The search over all cuts at one batch size; what is settled once is not solved again."""

    def __init__(self, p: Instance, search: _Search) -> None:
        self.p, self.search = p, search
        self.paths = Paths()
        self.settled: dict[Config, float] = {}
        """Up to which cost a configuration's cuts are known."""
        self.deadline = math.inf
        left = search.clock.left()
        if left is not None:
            self.deadline = time.perf_counter() + left

    def settle(self, base: Filter, limit: float) -> bool:
        """List every plan that costs at most ``limit``; False when the time ran out."""
        work = base.copy()
        if not work.reduce(limit):
            return True
        joined = join(work, limit, MAX_ROWS)
        if not joined.complete:
            return False
        table = joined.table.keep(joined.table.values["pp"] > 1)  # one stage has one cut: settled before
        if not table.size:
            return True
        rows = objective_rows(self.p, table.values)
        shapes, at = _shapes(table)
        linear = forms(self.p, table.values, shapes, at)
        times = items(self.p, table.values)
        order = np.argsort(rows.bound, kind="stable")
        beat = np.array(
            [
                self._to_beat(config, limit, bound)
                for config, bound in zip(self._configs(table), rows.bound, strict=True)
            ]
        )
        possible = np.zeros(table.size, dtype=bool)
        for shape in range(len(shapes)):
            here = np.flatnonzero(at == shape)
            possible[here] = self._caps(linear, table, here, beat[here]).possible
        for i in order.tolist():
            config = self._configs(table.keep(np.array([i])))[0]
            to_beat = self._to_beat(config, limit, rows.bound[i])
            if not possible[i] or rows.bound[i] > to_beat or self.settled.get(config, -1.0) >= to_beat:
                continue
            found = self._caps(linear, table, np.array([i]), np.array([to_beat]))
            if not found.possible[0]:
                continue
            row = Row.of(linear, times, table.values, i)
            answer = best_cut(self.p, row, to_beat, self.paths, (found.most[0], found.least[0]), self.deadline)
            if not answer.proven:
                return False
            self.settled[config] = to_beat
            if answer.layers is not None:
                self._list(config, answer.layers)
        return True

    def _configs(self, table: Table) -> list[Config]:
        from parsolve.optimizer.ranking import configs_of, without_cut

        return [without_cut(config) for config in configs_of(self.p, table, range(table.size))]

    def _to_beat(self, config: Config, limit: float, bound: float) -> float:
        """What a cut of this configuration must cost less than to matter."""
        known = min(limit, self.search.best.worst, self.search.best.key(config))
        return known if known < math.inf else bound * NO_BOUND

    def _caps(self, linear: object, table: Table, rows: Array, beat: Array) -> Caps:
        part = {axis: column[rows] for axis, column in table.values.items()}
        return caps(self.p, linear.rows(rows), part, beat)  # type: ignore[attr-defined]

    def _list(self, config: Config, layers: tuple[tuple[int, ...], ...]) -> None:
        """Evaluate and list a plan with its cut found."""
        from dataclasses import replace

        full = replace(config, layers_per_stage=layers)
        p = instance_for(self.p.problem, layers, self.p.gbs)
        if not violations(p, full):
            self.search.list_plan(p, full, objective_value(p, full))


def _shapes(table: Table) -> tuple[list[tuple[int, int]], Array]:
    """The (pp, vpp) that occur, and which one each row has."""
    pairs, at = np.unique(np.stack((table.values["pp"], table.values["vpp"])), axis=1, return_inverse=True)
    return [(int(pp), int(vpp)) for pp, vpp in pairs.T], at.ravel()
