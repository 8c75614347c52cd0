"""Lower bounds on the objective and the limits, and the dropping of rows that cannot beat a bound.

Every table row gets its own cost plus the cheapest completion in every other table that agrees with it on shared axes.
Rows above the bound, and rows without any completion, are dropped until nothing changes (soft arc consistency).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from parsolve.functions import Array
from parsolve.optimizer.tables import (
    Group,
    Quantity,
    Table,
    Tables,
    coefficients,
    row_codes,
    shared_codes,
    uses_grad_acc,
)

INFINITE = np.inf
_HUGE = np.finfo(float).max


@dataclass(frozen=True)
class _Link:
    """Two tables and a common numbering of their values on the axes that they share."""

    left: int
    right: int
    left_code: Array
    right_code: Array
    size: int


def _links(tables: Sequence[Table], domains: dict[str, Array]) -> list[_Link]:
    """One link for every ordered pair of tables that share axes."""
    links = []
    for i, left in enumerate(tables):
        for j, right in enumerate(tables[:i]):
            shared = [axis for axis in left.axes if axis in right.axes]
            if not shared:
                continue
            a, b, size = shared_codes(left, right, shared, domains)
            links += [_Link(i, j, a, b, size), _Link(j, i, b, a, size)]
    return links


def mean_coefficients(tables: Tables, quantity: Quantity) -> Array:
    """(split, group): the counts averaged over pipeline ranks; never above the worst rank's."""
    splits = tables.domains["split"]
    depths = tables.domains["grad_acc"][:1]
    if uses_grad_acc(quantity):  # the counts only grow with the number of microbatches
        depths = np.union1d(depths, [1])
    counts = coefficients(tables, quantity, splits, depths).min(axis=0)
    mean: Array = np.einsum("sr,srg->sg", tables.p.splits.weight[splits], counts)
    return mean


def row_costs(tables: Tables, quantities: Sequence[Quantity]) -> list[Array]:
    """A cost per row of every table whose sum over tables never exceeds the quantities' sum."""
    costs = [np.zeros(table.size) for table in tables.tables]
    for quantity in quantities:
        if not len(tables.domains["split"]):
            continue
        signs = {group.sign for group in quantity.groups}
        if quantity.at_least_zero and -1 in signs:
            continue
        floor = mean_coefficients(tables, quantity).min(axis=0)
        for i, group in enumerate(quantity.groups):
            costs[group.table] = costs[group.table] + floor[i] * group.cost
    return costs


class Filter:
    """The surviving rows of every table under a bound."""

    def __init__(self, tables: Tables, links: list[_Link] | None = None) -> None:
        """``links``: those of a filter over the same rows."""
        self.tables = tables
        self.alive = [np.ones(table.size, dtype=bool) for table in tables.tables]
        self.costs = row_costs(tables, tables.objective)
        self.limit_costs = [(row_costs(tables, [limit]), limit.budget or 0.0) for limit in tables.limits]
        self.links = _links(tables.tables, tables.domains) if links is None else links
        self.lower_bound = 0.0

    def reduce(self, bound: float = INFINITE) -> bool:
        """Drop rows until nothing changes; False when a table is empty, so nothing is below the bound."""
        steps: list[Callable[[], bool]] = [partial(self._complete, self.costs, bound)]
        steps += [partial(self._complete, costs, budget) for costs, budget in self.limit_costs]
        steps.append(partial(self._splits, bound))
        seen: list[int | None] = [None] * len(steps)  # surviving rows when a step last ran
        for _ in range(20):
            for i, step in enumerate(steps):
                if seen[i] == self.size:
                    continue
                if not step():
                    return False
                seen[i] = self.size
            if all(size == self.size for size in seen):
                return True
        return True

    @property
    def size(self) -> int:
        """Surviving rows of all tables."""
        return sum(int(np.count_nonzero(mask)) for mask in self.alive)

    def _complete(self, costs: list[Array], budget: float) -> bool:
        """Drop rows whose cost with the cheapest completions exceeds the budget."""
        rows = [np.flatnonzero(mask) for mask in self.alive]
        if not all(len(mine) for mine in rows):
            return False
        here = [cost[mine] for cost, mine in zip(costs, rows, strict=True)]
        least = [float(cost.min()) for cost in here]
        linked = [0.0] * len(rows)
        totals = [cost.copy() for cost in here]
        for link in self.links:
            lowest = np.full(link.size, INFINITE)
            np.minimum.at(lowest, link.right_code[rows[link.right]], here[link.right])
            totals[link.left] += lowest[link.left_code[rows[link.left]]]
            linked[link.left] += least[link.right]
        everything = sum(least)
        for i, total in enumerate(totals):
            total += everything - least[i] - linked[i]  # tables without a shared axis: their cheapest row
            self.alive[i][rows[i][total > min(budget, _HUGE)]] = False
        if costs is self.costs:
            self.lower_bound = max(self.lower_bound, *(float(total.min()) for total in totals))
        return all(mask.any() for mask in self.alive)

    def cheapest(self, group: Group) -> float:
        """The lowest surviving cost of a group of leaves."""
        return float(group.cost[self.alive[group.table]].min())

    def _splits(self, bound: float) -> bool:
        """Drop cuts whose worst stage, with the cheapest rows everywhere, exceeds the bound or a budget."""
        splits = self.tables.domains["split"]
        least = self.axis_values("grad_acc")[:1]
        if not len(least):
            return False
        total = np.zeros(len(splits))
        bad = np.zeros(len(splits), dtype=bool)
        for quantity in [*self.tables.objective, *self.tables.limits]:
            if any(group.sign < 0 for group in quantity.groups):
                continue
            counts = coefficients(self.tables, quantity, splits, least)[0]
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

    def only(self, axis: str, allowed: Callable[[Array], Array]) -> Filter:
        """A copy without the rows that hold other values of an axis."""
        twin = self.copy()
        for mask, table in zip(twin.alive, self.tables.tables, strict=True):
            if axis in table.axes:
                mask &= allowed(table.values[axis])
        return twin

    def copy(self) -> Filter:
        """An independent copy of the surviving rows."""
        twin = Filter.__new__(Filter)
        twin.__dict__.update(self.__dict__)
        twin.alive = [mask.copy() for mask in self.alive]
        return twin

    def compact(self) -> Filter:
        """A filter of the surviving rows only."""
        small = Filter(self.tables.keep(self.alive))
        small.lower_bound = self.lower_bound
        return small

    def keep_joined(self, joined: Table) -> None:
        """Drop every row that no joined assignment uses, whatever its values on axes that were not joined."""
        for i, table in enumerate(self.tables.tables):
            axes = [axis for axis in table.axes if axis in joined.axes]
            if axes:
                used = row_codes(joined, axes, self.tables.domains)
                own = row_codes(table, axes, self.tables.domains)
                self.alive[i] &= np.isin(own, used)
