"""Lower bounds on the objective and the limits, and the dropping of rows that cannot beat a bound.

Every table row gets its own cost plus the cheapest completion in every other table that agrees with it on shared axes.
Rows above the bound, and rows without any completion, are dropped until nothing changes (soft arc consistency).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parsolve.functions import Array
from parsolve.optimizer.tables import Group, Quantity, Table, Tables, coefficients, uses_grad_acc

INFINITE = np.inf
_HUGE = np.finfo(float).max


def row_codes(table: Table, axes: Sequence[str], domains: dict[str, Array]) -> tuple[Array, int]:
    """Mixed-radix number of each row's values on ``axes``, and the number of codes."""
    code = np.zeros(table.size, dtype=np.int64)
    size = 1
    for axis in axes:
        code = code * len(domains[axis]) + np.searchsorted(domains[axis], table.values[axis])
        size *= len(domains[axis])
    return code, size


@dataclass(frozen=True)
class _Link:
    """Two tables and a common numbering of their values on the axes that they share."""

    left: int
    right: int
    left_code: Array
    right_code: Array
    size: int


def _links(tables: Sequence[Table], domains: dict[str, Array]) -> list[_Link]:
    """One link for every ordered pair of tables; without shared axes all rows have code 0."""
    links = []
    for i, left in enumerate(tables):
        for j, right in enumerate(tables[:i]):
            shared = [axis for axis in left.axes if axis in right.axes]
            codes = np.concatenate((row_codes(left, shared, domains)[0], row_codes(right, shared, domains)[0]))
            present, number = np.unique(codes, return_inverse=True)
            a, b = number[: left.size], number[left.size :]
            links += [_Link(i, j, a, b, len(present)), _Link(j, i, b, a, len(present))]
    return links


def mean_coefficients(tables: Tables, quantity: Quantity) -> Array:
    """(split, group): the counts averaged over pipeline ranks; never above the worst rank's."""
    splits = tables.domains["split"]
    counts = coefficients(tables.p, quantity, splits, tables.domains["grad_acc"][:1])
    if uses_grad_acc(quantity):  # the counts only grow with the number of microbatches
        counts = np.minimum(counts, coefficients(tables.p, quantity, splits, np.array([1])))
    mean: Array = np.einsum("sr,srg->sg", tables.p.splits.weight[splits], counts)
    return mean


def row_costs(tables: Tables, quantities: Sequence[Quantity]) -> list[Array]:
    """A cost per row of every table whose sum over tables never exceeds the quantities' sum."""
    costs = [np.zeros(table.size) for table in tables.tables]
    for quantity in quantities:
        if not len(tables.domains["split"]):
            continue
        floor = mean_coefficients(tables, quantity).min(axis=0)
        signs = {group.sign for group in quantity.groups}
        if quantity.at_least_zero and -1 in signs:
            continue
        for i, group in enumerate(quantity.groups):
            costs[group.table] = costs[group.table] + floor[i] * group.cost
    return costs


class Filter:
    """The surviving rows of every table under a bound."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.alive = [np.ones(table.size, dtype=bool) for table in tables.tables]
        self.costs = row_costs(tables, tables.objective)
        self.limit_costs = [(row_costs(tables, [limit]), limit.budget or 0.0) for limit in tables.limits]
        self.links = _links(tables.tables, tables.domains)
        self.lower_bound = 0.0

    def reduce(self, bound: float = INFINITE) -> bool:
        """Drop rows until nothing changes; False when a table is empty, so nothing is below the bound."""
        checks = [(self.costs, bound), *self.limit_costs]
        for _ in range(20):
            before = sum(int(mask.sum()) for mask in self.alive)
            for costs, budget in checks:
                if not self._complete(costs, budget):
                    return False
            if not self._splits(bound):
                return False
            if sum(int(mask.sum()) for mask in self.alive) == before:
                return True
        return True

    def _complete(self, costs: list[Array], budget: float) -> bool:
        """Drop rows whose cost with the cheapest completions exceeds the budget."""
        totals = [np.where(mask, cost, INFINITE) for mask, cost in zip(self.alive, costs, strict=True)]
        alive_rows = [np.flatnonzero(mask) for mask in self.alive]
        for link in self.links:
            rows = alive_rows[link.right]
            lowest = np.full(link.size, INFINITE)
            np.minimum.at(lowest, link.right_code[rows], costs[link.right][rows])
            totals[link.left] += lowest[link.left_code]
        for i, total in enumerate(totals):
            self.alive[i] &= total <= min(budget, _HUGE)
            if not self.alive[i].any():
                return False
        if costs is self.costs:
            least = max(float(total[mask].min()) for total, mask in zip(totals, self.alive, strict=True))
            self.lower_bound = max(self.lower_bound, least)
        return True

    def cheapest(self, group: Group) -> float:
        """The lowest surviving cost of a group of leaves."""
        return float(group.cost[self.alive[group.table]].min())

    def _splits(self, bound: float) -> bool:
        """Drop cuts whose worst stage, with the cheapest rows everywhere, exceeds the bound or a budget."""
        splits = self.tables.domains["split"]
        p = self.tables.p
        least = self.axis_values("grad_acc")[:1]
        if not len(least):
            return False
        total = np.zeros(len(splits))
        bad = np.zeros(len(splits), dtype=bool)
        for quantity in [*self.tables.objective, *self.tables.limits]:
            if any(group.sign < 0 for group in quantity.groups):
                continue
            counts = coefficients(p, quantity, splits, least)
            cheapest = np.array([self.cheapest(group) for group in quantity.groups])
            worst = (counts @ cheapest).max(axis=1) if len(cheapest) else np.zeros(len(splits))
            if quantity.budget is None:
                total += worst
            else:
                bad |= worst > quantity.budget
        bad |= total > bound
        if bad.any():
            for i, table in enumerate(self.tables.tables):
                if "split" in table.axes:
                    self.alive[i] &= ~np.isin(table.values["split"], splits[bad])
        return all(mask.any() for mask in self.alive)

    def axis_values(self, axis: str) -> Array:
        """The values of an axis that some surviving row of every table with that axis still has."""
        present = self.tables.domains[axis]
        for table, mask in zip(self.tables.tables, self.alive, strict=True):
            if axis in table.axes:
                present = present[np.isin(present, table.values[axis][mask])]
        return present

    def copy(self) -> Filter:
        """An independent copy of the surviving rows."""
        twin = Filter.__new__(Filter)
        twin.__dict__.update(self.__dict__)
        twin.alive = [mask.copy() for mask in self.alive]
        return twin

    def keep_joined(self, joined: Table) -> None:
        """Drop every row that no joined assignment uses."""
        for i, table in enumerate(self.tables.tables):
            if table.axes:
                used, _ = row_codes(joined, table.axes, self.tables.domains)
                own, _ = row_codes(table, table.axes, self.tables.domains)
                self.alive[i] &= np.isin(own, used)
