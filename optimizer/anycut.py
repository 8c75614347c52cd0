"""All cuts of all configurations: which configurations could a cut bring onto the list, and which cut is their best.

The relaxed cuts (splits.free) give every configuration a bound below all its cuts; those within reach are joined. Rank
by rank ``cuts.caps`` then shows for most that no cut will do; ``cuts.best_cut`` solves the rest.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from parsolve.config import Config
from parsolve.evaluation import Rows, instance_for, objective_rows, objective_value, violations
from parsolve.functions import Array
from parsolve.objectives.step_time import items
from parsolve.optimizer.bounds import Filter
from parsolve.optimizer.cuts import Forms, Paths, Row, best_cut, caps, forms
from parsolve.optimizer.join import Joined, join
from parsolve.optimizer.tables import Table
from parsolve.problem import Instance
from parsolve.splits import balanced

if TYPE_CHECKING:
    from parsolve.optimizer.ranking import _Search

MAX_ROWS = 1_000_000
"""Configurations joined at once; more than that are not proven."""
MAX_STARTS = 150
"""Configurations whose balanced cuts are tried while nothing is listed."""
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
        one_stage = joined.table.values["pp"] == 1  # has one cut
        self.search.list_rows(self.p, joined.table.keep(one_stage))
        table = joined.table.keep(~one_stage)
        if not table.size:
            return True
        rows = objective_rows(self.p, table.values)
        shapes, at = _shapes(table)
        linear = forms(self.p, table.values, shapes, at)
        times = items(self.p, table.values)
        configs = self._configs(table)
        todo = [
            i for i in np.argsort(rows.bound, kind="stable").tolist() if not self._known(configs[i], limit, rows, i)
        ]
        self._start(configs, todo, limit, rows)
        reach = _reach(self.p, linear, table, at, todo, [self._to_beat(configs[i], limit, rows.bound[i]) for i in todo])
        todo = [i for i in todo if i in reach]
        while todo:
            i = todo.pop(0)
            to_beat = self._to_beat(configs[i], limit, rows.bound[i])
            if rows.bound[i] > to_beat:
                continue
            row = Row.of(linear, times, table.values, i)
            answer = best_cut(self.p, row, to_beat, self.paths, reach[i], self.deadline)
            if not answer.proven:
                return False
            self.settled[configs[i]] = to_beat
            if answer.layers is not None:
                self._list(configs[i], answer.layers)
                beat = [self._to_beat(configs[j], limit, rows.bound[j]) for j in todo]
                reach = _reach(self.p, linear, table, at, todo, beat)
                todo = [j for j in todo if j in reach]
        return True

    def _start(self, configs: list[Config], todo: list[int], limit: float, rows: Rows) -> None:
        """Balanced cuts of the most promising configurations, until there is a list to beat."""
        layers = self.p.model.num_layers
        for i in todo[:MAX_STARTS]:
            if self.search.best.worst < math.inf or time.perf_counter() > self.deadline:
                return
            pp, vpp = configs[i].pp, configs[i].vpp
            if pp * vpp <= layers and self._to_beat(configs[i], limit, rows.bound[i]) > rows.bound[i]:
                fuller_first = balanced(layers, pp, vpp)
                fuller_last = tuple(rank[::-1] for rank in fuller_first[::-1])
                for cut in dict.fromkeys((fuller_first, fuller_last)):
                    self._list(configs[i], cut)

    def _known(self, config: Config, limit: float, rows: Rows, i: int) -> bool:
        return self.settled.get(config, -1.0) >= self._to_beat(config, limit, rows.bound[i])

    def _configs(self, table: Table) -> list[Config]:
        from parsolve.optimizer.ranking import configs_of, without_cut

        return [without_cut(config) for config in configs_of(self.p, table, range(table.size))]

    def _to_beat(self, config: Config, limit: float, bound: float) -> float:
        """What a cut of this configuration must cost less than to matter."""
        known = min(limit, self.search.best.worst, self.search.best.key(config))
        return known if known < math.inf else bound * NO_BOUND

    def _list(self, config: Config, layers: tuple[tuple[int, ...], ...]) -> None:
        """Evaluate and list a plan with its cut found."""
        full = replace(config, layers_per_stage=layers)
        p = instance_for(self.p.problem, layers, self.p.gbs)
        if not violations(p, full):
            self.search.list_plan(p, full, objective_value(p, full))


def _shapes(table: Table) -> tuple[list[tuple[int, int]], Array]:
    """The (pp, vpp) that occur, and which one each row has."""
    pairs, at = np.unique(np.stack((table.values["pp"], table.values["vpp"])), axis=1, return_inverse=True)
    return [(int(pp), int(vpp)) for pp, vpp in pairs.T], at.ravel()


def _reach(
    p: Instance, linear: Forms, table: Table, at: Array, todo: list[int], beat: list[float]
) -> dict[int, tuple[Array, Array]]:
    """The most and the least layers of each rank, for the rows of ``todo`` that some cut could make cheap enough."""
    found = {}
    rows, values = np.array(todo, dtype=np.int64), np.array(beat)
    for shape in np.unique(at[rows]).tolist():
        here = np.flatnonzero(at[rows] == shape)
        part = {axis: column[rows[here]] for axis, column in table.values.items()}
        answer = caps(p, linear.rows(rows[here]), part, values[here])
        for j in np.flatnonzero(answer.possible).tolist():
            found[int(rows[here[j]])] = (answer.most[j], answer.least[j])
    return found


def first_legal_cut(p: Instance, base: Filter, deadline: float) -> Config | None:
    """A legal plan with any cut among the surviving rows, None with certainty that there is none.

    Raises
    ------
    TimeoutError: ``time.perf_counter()`` passed the deadline, or there are too many configurations to be certain.
    """
    for rows in (300, 20_000, MAX_ROWS):
        joined, found = _first_among(p, base, rows, deadline)
        if found is not None or joined.complete:
            return found
    raise TimeoutError


def _first_among(p: Instance, base: Filter, rows: int, deadline: float) -> tuple[Joined, Config | None]:
    """The join of up to so many rows, and a legal plan among them."""
    from parsolve.optimizer.ranking import configs_of

    joined = join(base, math.inf, rows)
    table = joined.table.keep(joined.table.values["pp"] > 1) if joined.table.axes else joined.table
    if table.size:
        shapes, at = _shapes(table)
        linear = forms(p, table.values, shapes, at, objective=False)
        times = items(p, table.values)
        every = list(range(table.size))
        for i, reach in _reach(p, linear, table, at, every, [math.inf] * table.size).items():
            if time.perf_counter() > deadline:
                raise TimeoutError
            found = best_cut(p, Row.of(linear, times, table.values, i), 1.0, Paths(), reach, deadline)
            if found.layers is not None:
                return joined, replace(configs_of(p, table, [i])[0], layers_per_stage=found.layers)
            if not found.proven:
                raise TimeoutError
    return joined, None
