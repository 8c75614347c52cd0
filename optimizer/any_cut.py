"""All cuts of all configurations: which configurations could a cut bring onto the list, and which cut is their best.

The relaxed cuts (splits.free) give every configuration a bound below all its cuts; those within reach are joined. Rank
by rank ``cut_caps.caps`` then shows for most that no cut will do; ``best_cut.best_cut`` solves the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from parsolve.config import Config
from parsolve.evaluation import instance_of, objective_rows, objective_value, violations
from parsolve.functions import Array, Points
from parsolve.objectives.step_time import items
from parsolve.optimizer.best_cut import Found, Paths, best_cut
from parsolve.optimizer.bounds import Filter
from parsolve.optimizer.cut_caps import Caps, ShapeRows, caps
from parsolve.optimizer.cut_forms import SLACK, Row, forms
from parsolve.optimizer.cut_list import ShapeCuts
from parsolve.optimizer.join import Joined, join
from parsolve.optimizer.likely_cuts import most_promising
from parsolve.optimizer.tables import Table
from parsolve.problem import Instance
from parsolve.splits import Layers, from_model_order

if TYPE_CHECKING:
    from parsolve.optimizer.ranking import _List, _Search

MAX_ROWS = 1_000_000
"""Configurations joined at once; more than that are not proven."""
MAX_STARTS, FEW_STARTS = 150, 10
"""Configurations whose likely cuts are tried first, while the list is not full, and when it is."""
LOOK_AT, LIKELY = 100, 32
"""Configurations, the lowest bounds first, whose likely cuts are looked at, and of them evaluated along own paths."""
NO_BOUND = 1e3
"""Without any plan so far, cuts up to this many times the configuration's bound are looked for."""

RISES = (1.1, 1.3, 1.6, 2.0, 3.0, math.inf)
"""Multiples of the lowest bound up to which plans are looked for while the list is not full."""


class AnyCut:
    """The search over all cuts at one batch size; what is settled once is not solved again."""

    def __init__(self, p: Instance, search: _Search) -> None:
        self.p, self.search = p, search
        self.paths = Paths()
        self.settled: dict[Config, float] = {}
        """Up to which cost a configuration's cuts are known, those with its ``mtp_apart``."""
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
        try:
            rows = Open(self.p, self.search.best, table, limit, self.deadline)
            return self._settle(rows, limit)
        except TimeoutError:
            return False

    def _settle(self, rows: Open, limit: float) -> bool:
        if not rows.table.size:
            return True
        self._start(rows)
        for goal in rows.bound.min() * np.array(RISES):
            last = min(limit, self.search.best.worst)
            rows.aim(last if last < math.inf else goal)
            if not self._up_to_aim(rows):
                return False
            if rows.limit >= last:
                break
        return True

    def _up_to_aim(self, rows: Open) -> bool:
        """List every plan of the rows that costs less than what they have to beat; False when the time ran out."""
        for i in rows.order[(rows.bound <= rows.beat)[rows.order]].tolist():
            config, beat = rows.configs[i], float(rows.beat[i])
            if rows.bound[i] > beat or self.settled.get(config, -1.0) >= beat:
                continue
            answer = self._best_cut(rows, i)
            if not answer.proven:
                return False
            self.settled[config] = beat
            if answer.layers is not None:
                self._list(config, answer.layers)
                rows.refresh()
        return True

    def _best_cut(self, rows: Open, i: int) -> Found:
        """The best cut of a row; where there are too many to list, those a little above its bound first."""
        beat = float(rows.beat[i])
        cuts = rows.cuts(i)
        if cuts is None:
            return Found(None, beat, True)
        row, confirm = rows.row(i), partial(_is_legal, self.p, rows.configs[i])
        known = self.paths.of(row.shape)
        shared, place = cuts
        if shared.chosen is None:
            shared, place = shared.alone(self.p, place, row, beat, known), 0
        if shared.chosen is not None:
            return best_cut(self.p, row, beat, self.paths, shared, place, confirm, self.deadline)
        for guess, few in rows.rising(i):
            alone = few.alone(self.p, 0, row, guess, known)
            answer = best_cut(self.p, row, guess, self.paths, alone, 0, confirm, self.deadline)
            if answer.layers is not None or not answer.proven:
                return answer
        return Found(None, beat, True)

    def _start(self, rows: Open) -> None:
        """Likely cuts of the most promising configurations: a short list to beat, and an order to go on in."""
        some = rows.by_bound[:LOOK_AT]
        part = (rows.linear.rows(some), rows.times.rows(some), rows.table.keep(some).values)
        looked_at = most_promising(self.p, *part, self.paths, LIKELY)
        promising = [likely._replace(row=int(some[likely.row])) for likely in looked_at]
        tried: list[tuple[float, int]] = []
        for cost, i, shape, counts in promising:
            full = self.search.best.worst < math.inf
            if cost >= rows.limit or cost >= self.search.best.worst or time.perf_counter() > self.deadline:
                break
            if len(tried) >= (FEW_STARTS if full else MAX_STARTS):
                break
            cut = from_model_order(counts, shape.pp)
            if cost < rows.beat[i] and _is_legal(self.p, rows.configs[i], cut):
                tried.append((self._list(rows.configs[i], cut), i))
        rows.refresh()
        found = [i for cost, i in sorted(tried) if cost <= rows.beat[i] * (1 + SLACK)]
        missed = {i for _, i in tried}.difference(found)  # by more than their likely cuts promise
        rows.first([*found, *(likely.row for likely in promising if likely.row not in missed)])

    def _list(self, config: Config, layers: Layers) -> float:
        """Evaluate and list a plan with a legal cut; its cost."""
        full = replace(config, layers_per_stage=layers)
        p = instance_of(self.p.problem, full, gbs=self.p.gbs)
        value = objective_value(p, full)
        self.search.list_plan(p, full, value)
        return value


def _is_legal(p: Instance, config: Config, layers: Layers) -> bool:
    """Whether the evaluator finds nothing against a configuration with that cut."""
    full = replace(config, layers_per_stage=layers)
    return not violations(instance_of(p.problem, full, gbs=p.gbs), full)


def _shapes(p: Instance, table: Table) -> Array:
    """A number for the pipeline shape of each row: pp, vpp, and where prediction modules are."""
    shapes = (table.values["pp"], table.values["vpp"], p.splits.mtp_apart[table.values["split"]])
    _, at = np.unique(np.stack(shapes), axis=1, return_inverse=True)
    return np.asarray(at.ravel())


STEPS = (1.02, 1.04, 1.07, 1.1, 1.14, 1.18, 1.23, 1.3, 1.4, 1.6, 2.0, 3.0)
"""Where a configuration's cuts are too many, those up to these multiples of its bound are looked at first."""
TIES = 4 * SLACK
"""Cuts are looked for that cost less than some value by more than the slack of comparisons: room for equal ones."""
SHAPES_AT_ONCE = 16
"""Pipeline shapes whose configurations are looked at together when those for which no cut will do are dropped."""
STALE = 1e-2
"""The cuts that a row may take are looked at again when what it has to beat has fallen by this share, or risen."""


@dataclass
class _Group:
    """Rows of one pipeline shape that some cut could make cheap enough.

    ``place``: row of the table to place in ``of``. ``shared``: the cuts that any of them may take.
    """

    place: dict[int, int]
    of: ShapeRows
    shared: ShapeCuts | None = None


class Candidates:
    """Rows of a table and the cuts that they may take, listed shape by shape when they are first asked for.

    ``beat``: what a cut of each must cost less than to matter.
    """

    def __init__(
        self, p: Instance, table: Table, bound: Array, objective: bool = True, deadline: float = math.inf
    ) -> None:
        self.p, self.table, self.bound, self.deadline = p, table, bound, deadline
        self.at = _shapes(p, table)
        points = Points.of(p, table.values)
        self.linear, self.times = forms(p, points, objective), items(p, points)
        self.beat = np.full(table.size, math.inf)
        self._groups: dict[int, _Group] = {}
        self._grouped_at = np.full(table.size, math.nan)

    def row(self, i: int) -> Row:
        """One row."""
        return Row.of(self.linear, self.times, self.table.values, i)

    def cuts(self, i: int) -> tuple[ShapeCuts, int] | None:
        """Cuts among which are all that row ``i`` may take, and which of their rows it is; None: no cut will do."""
        shape = int(self.at[i])
        if not self._grouped_at[i] * (1 - STALE) <= self.beat[i] <= self._grouped_at[i]:
            rows = np.flatnonzero((self.at == shape) & (self.bound <= self.beat))
            possible, of = self._possible(rows, self.beat[rows])
            self._groups[shape] = _Group({row: at for at, row in enumerate(possible.tolist())}, of)
            self._grouped_at[rows] = self.beat[rows]
        group = self._groups[shape]
        if i not in group.place:
            return None
        if group.shared is None:
            group.shared = ShapeCuts.of(self.p, group.of)
        return group.shared, group.place[i]

    def rising(self, i: int) -> Iterator[tuple[float, ShapeCuts]]:
        """The same for one row, from values to beat a little above its bound up to what it has to beat."""
        guesses = np.unique(np.minimum(self.bound[i] * np.array([*STEPS, math.inf]), self.beat[i]))
        _, of = self._possible(np.full(len(guesses), i), guesses)
        for k, guess in enumerate(of.beat.tolist()):
            yield guess, ShapeCuts.of(self.p, of.rows(slice(k, k + 1)))

    def _caps(self, rows: Array, beat: Array) -> Caps:
        """What the ranks of some rows of one pipeline size can hold, if they are to cost less than ``beat`` (row,).

        Raises
        ------
        TimeoutError: ``time.perf_counter()`` passed the deadline.
        """
        if time.perf_counter() > self.deadline:
            raise TimeoutError
        return caps(self.p, self.linear.rows(rows), self.table.keep(rows).values, beat)

    def _possible(self, rows: Array, beat: Array) -> tuple[Array, ShapeRows]:
        """Those of the rows, of one shape, that some cut could make cheaper than ``beat`` (row,)."""
        answer = self._caps(rows, beat)
        some = rows[answer.possible]
        caps_of = (column[answer.possible] for column in (answer.most, answer.least, beat))
        return some, ShapeRows(self.linear.rows(some), self.times.rows(some), self.table.keep(some).values, *caps_of)


class Open(Candidates):
    """Rows in an order, with what a list of plans and what is settled leave to do."""

    def __init__(self, p: Instance, best: _List, table: Table, limit: float, deadline: float) -> None:
        from parsolve.optimizer.ranking import configs_of

        points = Points(p, table.values)
        bound = objective_rows(p, points).bound
        super().__init__(p, Table(table.axes, points), bound, deadline=deadline)
        self.best, self.limit = best, limit
        self._aim_all()
        self._drop_impossible()
        table = self.table
        self.configs = [replace(config, layers_per_stage=()) for config in configs_of(p, table, range(table.size))]
        self.order = self.by_bound = np.argsort(self.bound, kind="stable")
        self.by_name: dict[Any, list[int]] = {}
        for i, config in enumerate(self.configs):
            self.by_name.setdefault(best.name(config), []).append(i)
        self.refresh()

    def _aim_all(self) -> None:
        """What there is to beat for whatever is not listed."""
        known = min(self.limit, self.best.worst) * (1 + TIES)  # an equal cost may stand before the last by name
        self.beat = np.full(self.table.size, known) if known < math.inf else self.bound * NO_BOUND

    def _drop_impossible(self) -> None:
        """Forget the rows that no cut will do for."""
        possible = np.zeros(self.table.size, dtype=bool)
        for pp in np.unique(self.table.values["pp"]).tolist():
            shapes = np.unique(self.at[self.table.values["pp"] == pp])
            for start in range(0, len(shapes), SHAPES_AT_ONCE):
                rows = np.flatnonzero(np.isin(self.at, shapes[start : start + SHAPES_AT_ONCE]))
                possible[rows] = self._caps(rows, self.beat[rows]).possible
        some = np.flatnonzero(possible)
        self.table, self.linear, self.times = self.table.keep(some), self.linear.rows(some), self.times.rows(some)
        self.bound, self.at, self.beat = self.bound[some], self.at[some], self.beat[some]
        self._grouped_at = self._grouped_at[some]

    def first(self, rows: list[int]) -> None:
        """Take these rows first, in their order; the others by their bounds."""
        self.order = np.array([*dict.fromkeys([*rows, *self.by_bound.tolist()])])

    def aim(self, limit: float) -> None:
        """Look no further than this cost."""
        self.limit = limit
        self.refresh()

    def refresh(self) -> None:
        """What there is to beat, after the list has changed."""
        self._aim_all()
        for name, plan in self.best.best.items():
            here = self.by_name.get(name, [])
            self.beat[here] = np.minimum(self.beat[here], plan.key)


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
        candidates = Candidates(p, table, np.zeros(table.size), objective=False, deadline=deadline)
        for i in range(table.size):
            if time.perf_counter() > deadline:
                raise TimeoutError
            cuts = candidates.cuts(i)
            if cuts is None:
                continue
            config = configs_of(p, table, [i])[0]
            found = best_cut(p, candidates.row(i), 1.0, Paths(), *cuts, partial(_is_legal, p, config), deadline)
            if found.layers is not None:
                return joined, replace(config, layers_per_stage=found.layers)
            if not found.proven:
                raise TimeoutError
    return joined, None
