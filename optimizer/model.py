"""The CP-SAT model of one instance: value literals per axis, row literals per table, integer costs on the rows.

Costs are counted in ticks and rounded so that the model is a relaxation: a cost that pushes the objective up is rounded
down, one that pulls it down is rounded up. Whatever is legal and cheap in floating point is therefore a solution here;
a solution that turns out dearer in floating point is blocked and the search goes on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from parsolve.functions import Array
from parsolve.optimizer.tables import Quantity, Table, Tables, coefficients, uses_grad_acc

RESOLUTION = 10**7
"""Ticks in the bound (or in a budget): rounding loses at most about counts x leaves ticks, under 0.01 %."""
COUNT_SCALE = 16
"""Counts are whole or simple fractions; they are scaled to integers by this and rounded down."""


@dataclass
class Outcome:
    """What one solve found: axis values or None, and whether the search finished."""

    values: dict[str, int] | None
    finished: bool


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")


def _solve_interruptibly(solver: cp_model.CpSolver, model: cp_model.CpModel) -> int:
    """Solve in a thread of its own, so that ctrl-c reaches this one at once and stops the search."""
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(solver.solve, model)
        try:
            return int(search.result())
        except KeyboardInterrupt:
            solver.stop_search()
            raise


class CpModel:
    """Builds the model once; plans are blocked and the model re-solved."""

    def __init__(self, tables: Tables, alive: Sequence[Array], bound: float) -> None:
        self.tables, self.p = tables, tables.p
        self.model = cp_model.CpModel()
        self.live = [table.keep(mask) for table, mask in zip(tables.tables, alive, strict=True)]
        self.masks = list(alive)
        self.literals = self._value_literals()
        self.rows = [self._row_literals(table) for table in self.live]
        self.groups: dict[tuple[int, frozenset[int]], cp_model.IntVar] = {}
        self.tick = bound / RESOLUTION
        if math.isfinite(bound):
            self._cost_bound()
        for limit in tables.limits:
            self._limit(limit)

    # ---- axes and tables --------------------------------------------------------------------------------------
    def _value_literals(self) -> dict[str, dict[int, cp_model.IntVar]]:
        """One Boolean for each surviving value of each axis, exactly one true."""
        literals: dict[str, dict[int, cp_model.IntVar]] = {}
        for axis in self.tables.domains:
            holders = [set(t.values[axis].tolist()) for t in self.live if axis in t.axes]
            values = set.intersection(*holders) if holders else set(self.tables.domains[axis].tolist())
            literals[axis] = {v: self.model.new_bool_var(f"{axis}={v}") for v in sorted(values)}
            self.model.add_exactly_one(literals[axis].values())
        return literals

    def _row_literals(self, table: Table) -> list[cp_model.IntVar]:
        """One Boolean for each row, exactly one true, tied to the value literals of the row's axes."""
        if not table.axes:
            return [self.model.new_constant(1)]
        if len(table.axes) == 1:
            axis = table.axes[0]
            return [self.literals[axis].get(int(v), self.model.new_constant(0)) for v in table.values[axis]]
        rows = [self.model.new_bool_var("") for _ in range(table.size)]
        self.model.add_exactly_one(rows)
        for axis in table.axes:
            holders: dict[int, list[cp_model.IntVar]] = {v: [] for v in self.literals[axis]}
            for row, value in zip(rows, table.values[axis].tolist(), strict=True):
                if value in holders:
                    holders[value].append(row)
                else:
                    self.model.add(row == 0)
            for value, members in holders.items():
                self.model.add(sum(members) == self.literals[axis][value])
        return rows

    # ---- costs ------------------------------------------------------------------------------------------------
    def _ticks(self, cost: Array, tick: float, sign: int) -> Array:
        ticks = cost / tick
        return (np.floor(ticks) if sign > 0 else np.ceil(ticks)).astype(np.int64)

    def _cost_var(self, quantity: Quantity, index: int, tick: float, cap: int) -> cp_model.IntVar:
        """An integer variable for one group's leaf value in ticks."""
        group = quantity.groups[index]
        ticks = self._ticks(group.cost[self.masks[group.table]], tick, group.sign)
        if group.sign > 0:
            ticks = np.minimum(ticks, cap)
        low, high = (int(ticks.min()), int(ticks.max())) if len(ticks) else (0, 0)
        var = self.model.new_int_var(low, high, "")
        rows = self.rows[group.table]
        pairs = [(row, int(t) - low) for row, t in zip(rows, ticks.tolist(), strict=True) if t != low]
        self.model.add(var == low + cp_model.LinearExpr.weighted_sum([r for r, _ in pairs], [t for _, t in pairs]))
        return var

    def _plain_sum(self, quantity: Quantity, tick: float, cap: int) -> cp_model.LinearExpr | None:
        """The quantity as one linear expression when no count varies, else None."""
        if quantity.at_least_zero or any(group.count is not None for group in quantity.groups):
            return None
        return cp_model.LinearExpr.sum([self._cost_var(quantity, i, tick, cap) for i in range(len(quantity.groups))])

    def _stage_cases(self, quantity: Quantity) -> list[tuple[list[cp_model.IntVar], Array]]:
        """Each (literals that select a case, array (stage, group) of counts without dominated rows)."""
        splits = np.array(sorted(self.literals["split"]), dtype=np.int64)
        depths = np.array(sorted(self.literals["grad_acc"]), dtype=np.int64)
        varying = uses_grad_acc(quantity)
        counts = coefficients(self.tables, quantity, splits, depths if varying else depths[:1])
        positive = all(group.sign > 0 for group in quantity.groups)
        cases = []
        for i, split in enumerate(splits.tolist()):
            by_counts: dict[bytes, list[int]] = {}
            for j in range(len(counts)):
                by_counts.setdefault(counts[j, i].tobytes(), []).append(j)
            for members in by_counts.values():
                stages = np.unique(counts[members[0], i], axis=0)
                if positive:
                    dominated = [
                        any((other >= row).all() and k != at for k, other in enumerate(stages))
                        for at, row in enumerate(stages)
                    ]
                    stages = stages[~np.array(dominated)]
                guard = [self.literals["split"][split]]
                if len(members) < len(counts):
                    guard.append(self._any_of(tuple(int(depths[j]) for j in members)))
                cases.append((guard, stages))
        return cases

    def _any_of(self, depths: tuple[int, ...]) -> cp_model.IntVar:
        """A literal that is true when grad_acc is one of ``depths``."""
        if len(depths) == 1:
            return self.literals["grad_acc"][depths[0]]
        key = (-1, frozenset(depths))
        if key not in self.groups:
            self.groups[key] = self.model.new_bool_var("")
            for depth in depths:
                self.model.add_implication(self.literals["grad_acc"][depth], self.groups[key])
        return self.groups[key]

    def _stage_sums(
        self, quantity: Quantity, tick: float, cap: int
    ) -> list[tuple[list[cp_model.IntVar], cp_model.LinearExpr]]:
        """Guarded integer lower bounds of each worst-stage candidate, times COUNT_SCALE."""
        variables = [self._cost_var(quantity, i, tick, cap) for i in range(len(quantity.groups))]
        signs = [group.sign for group in quantity.groups]
        sums = []
        for guard, stages in self._stage_cases(quantity):
            for stage in stages:
                weights = [
                    sign * int(math.floor(c * COUNT_SCALE) if sign > 0 else math.ceil(c * COUNT_SCALE))
                    for sign, c in zip(signs, stage, strict=True)
                ]
                sums.append((guard, cp_model.LinearExpr.weighted_sum(variables, weights)))
        return sums

    def _cost_bound(self) -> None:
        """The step time in ticks, a sum of variables bounded from below, is at most the bound."""
        summands: list[cp_model.LinearExpr | cp_model.IntVar] = []
        cap = RESOLUTION + 1
        for quantity in self.tables.objective:
            plain = self._plain_sum(quantity, self.tick, cap)
            if plain is not None:
                summands.append(plain)
                continue
            value = self.model.new_int_var(0, RESOLUTION, quantity.name)
            for guard, total in self._stage_sums(quantity, self.tick, cap):
                self.model.add(COUNT_SCALE * value >= total - (COUNT_SCALE - 1)).only_enforce_if(guard)
            summands.append(value)
        self.model.add(cp_model.LinearExpr.sum(summands) <= RESOLUTION)

    def _limit(self, limit: Quantity) -> None:
        budget = limit.budget or 0.0
        tick = max(budget, 1e-9) / RESOLUTION
        cap = 2 * RESOLUTION
        if budget < 0:
            self.model.add_bool_or([])
            return
        plain = self._plain_sum(limit, tick, cap)
        if plain is not None:
            self.model.add(plain <= RESOLUTION)
            return
        for guard, total in self._stage_sums(limit, tick, cap):
            self.model.add(total <= COUNT_SCALE * RESOLUTION).only_enforce_if(guard)

    # ---- solving ----------------------------------------------------------------------------------------------
    def block(self, values: Mapping[str, int]) -> None:
        """Forbid one plan, or all plans that share some values."""
        chosen = [self.literals[axis].get(value) for axis, value in values.items()]
        if all(literal is not None for literal in chosen):
            self.model.add_bool_or([literal.negated() for literal in chosen if literal is not None])

    def solve(self, time_limit: float | None, log: bool = False, workers: int = 1) -> Outcome:
        """Find any plan within the bound or prove that there is none; deterministic with one worker."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 0
        solver.parameters.log_search_progress = log
        solver.parameters.log_to_stdout = False
        solver.log_callback = _log
        solver.parameters.catch_sigint_signal = False  # its handler would replace Python's for good
        if time_limit is not None:
            solver.parameters.max_time_in_seconds = max(0.01, time_limit)
        status = _solve_interruptibly(solver, self.model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            values = {
                axis: next(v for v, literal in literals.items() if solver.boolean_value(literal))
                for axis, literals in self.literals.items()
            }
            return Outcome(values, True)
        return Outcome(None, status == cp_model.INFEASIBLE)
