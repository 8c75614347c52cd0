"""Lower bounds on the objective, the dropping of rows that cannot beat a bound, and the join of what is left.

Every table row gets its own cost plus the cheapest completion in every other table that agrees with it on shared axes.
Rows above the bound, and rows without any completion, are dropped until nothing changes (soft arc consistency). The
join then lists every full assignment whose accumulated bound stays below, so with a bound it is an exact enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parsolve.functions import Array
from parsolve.optimizer.tables import Group, Quantity, Table, Tables, coefficients, uses_grad_acc

INFINITE = np.inf


def _codes(table: Table, axes: Sequence[str], domains: dict[str, Array]) -> tuple[Array, int]:
    """Mixed-radix number of each row's values on ``axes``, and the number of codes."""
    code = np.zeros(table.size, dtype=np.int64)
    size = 1
    for axis in axes:
        code = code * len(domains[axis]) + np.searchsorted(domains[axis], table.values[axis])
        size *= len(domains[axis])
    return code, size


def _cheapest(table: Table, cost: Array, axes: Sequence[str], domains: dict[str, Array]) -> tuple[Array, Array]:
    """Sorted codes on ``axes`` present in the table and the lowest cost of each."""
    code, _ = _codes(table, axes, domains)
    order = np.argsort(code, kind="stable")
    present, start = np.unique(code[order], return_index=True)
    return present, (np.minimum.reduceat(cost[order], start) if len(start) else cost[:0])


def mean_coefficients(tables: Tables, quantity: Quantity) -> Array:
    """(split, group): the counts averaged over pipeline ranks; never above the worst rank's."""
    splits = tables.domains["split"]
    counts = coefficients(tables.p, quantity, splits, tables.domains["grad_acc"][:1])
    if uses_grad_acc(quantity):  # the counts only grow with the number of microbatches
        counts = np.minimum(counts, coefficients(tables.p, quantity, splits, np.array([1])))
    return np.einsum("sr,srg->sg", tables.p.splits.weight[splits], counts)


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
        self.lower_bound = 0.0

    def reduce(self, bound: float = INFINITE) -> bool:
        """Drop rows until nothing changes; False when a table is empty, so nothing is below the bound."""
        checks = [(self.costs, bound), *self.limit_costs]
        for _ in range(20):
            before = sum(int(mask.sum()) for mask in self.alive)
            if before and not self._values():
                return False
            for costs, budget in checks:
                if not self._complete(costs, budget):
                    return False
            self._splits(bound)
            if sum(int(mask.sum()) for mask in self.alive) == before:
                return True
        return True

    def _values(self) -> bool:
        """Drop rows with a value that another table no longer has."""
        present: dict[str, Array] = {}
        for table, mask in zip(self.tables.tables, self.alive, strict=True):
            for axis in table.axes:
                values = np.unique(table.values[axis][mask])
                present[axis] = np.intersect1d(present[axis], values) if axis in present else values
        for i, table in enumerate(self.tables.tables):
            for axis in table.axes:
                self.alive[i] &= np.isin(table.values[axis], present[axis])
            if table.axes and not self.alive[i].any():
                return False
        return True

    def _complete(self, costs: list[Array], budget: float) -> bool:
        """Drop rows whose cost with the cheapest completions exceeds the budget."""
        tables, domains = self.tables.tables, self.tables.domains
        live = [table.keep(mask) for table, mask in zip(tables, self.alive, strict=True)]
        totals = [costs[i][self.alive[i]].copy() for i in range(len(tables))]
        base = [costs[i][self.alive[i]] for i in range(len(tables))]
        for i, table in enumerate(live):
            for j, other in enumerate(live):
                if i == j:
                    continue
                shared = [axis for axis in table.axes if axis in other.axes]
                if not shared:
                    totals[i] += base[j].min() if len(base[j]) else INFINITE
                    continue
                present, lowest = _cheapest(other, base[j], shared, domains)
                code, _ = _codes(table, shared, domains)
                if not len(present):
                    totals[i] += INFINITE
                    continue
                at = np.minimum(np.searchsorted(present, code), len(present) - 1)
                totals[i] += np.where(present[at] == code, lowest[at], INFINITE)
        for i in range(len(tables)):
            if not len(totals[i]):
                return False
            keep = np.zeros(len(self.alive[i]), dtype=bool)
            keep[np.flatnonzero(self.alive[i])[totals[i] <= budget]] = True
            self.alive[i] = keep
            if not keep.any():
                return False
        if costs is self.costs:
            self.lower_bound = max(self.lower_bound, max(float(total.min()) for total in totals))
        return True

    def cheapest(self, group: Group) -> float:
        """The lowest surviving cost of a group of leaves."""
        return float(group.cost[self.alive[group.table]].min())

    def _splits(self, bound: float) -> None:
        """Drop cuts whose worst stage, with the cheapest rows everywhere, exceeds the bound or a budget."""
        splits = self.tables.domains["split"]
        p = self.tables.p
        least = np.array([int(self._axis_min("grad_acc"))])
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

    def _axis_min(self, axis: str) -> int:
        values = [
            int(table.values[axis][mask].min())
            for table, mask in zip(self.tables.tables, self.alive, strict=True)
            if axis in table.axes and mask.any()
        ]
        return max(values, default=1)

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
                used, _ = _codes(joined, table.axes, self.tables.domains)
                own, _ = _codes(table, table.axes, self.tables.domains)
                self.alive[i] &= np.isin(own, used)

    def join(self, bound: float, max_rows: int) -> tuple[Table, Array, bool]:
        """Every full assignment below the bound with its lower bound; False when cut off at ``max_rows``.

        When cut off, the partial assignments with the lowest bound are kept, so the result is still a good sample.
        """
        domains = self.tables.domains
        live = [table.keep(mask) for table, mask in zip(self.tables.tables, self.alive, strict=True)]
        base = [self.costs[i][mask] for i, mask in enumerate(self.alive)]
        todo = [i for i in range(len(live)) if live[i].axes]
        floor = sum(float(base[i].min()) if len(base[i]) else 0.0 for i in todo)
        constant = sum(float(base[i][0]) for i in range(len(live)) if not live[i].axes)
        current, cost, complete = Table((), {}), np.full(1, constant), True
        while todo:
            i = min(todo, key=lambda k: self._growth(current, live[k]))
            todo.remove(i)
            floor -= float(base[i].min()) if len(base[i]) else 0.0
            current, cost = _natural_join(current, cost, live[i], base[i], domains)
            keep = cost + floor <= bound
            current, cost = current.keep(keep), cost[keep]
            if len(cost) > max_rows:
                complete = False
                best = np.sort(np.argpartition(cost, max_rows)[:max_rows])
                chosen = np.zeros(len(cost), dtype=bool)
                chosen[best] = True
                current, cost = current.keep(chosen), cost[chosen]
        return current, cost, complete

    def _growth(self, current: Table, table: Table) -> tuple[float, int]:
        """Expected growth of joining a table: its rows divided by the combinations of shared axes."""
        shared = [axis for axis in table.axes if axis in current.axes]
        if not shared:
            return (1e6 + table.size, table.size)
        code, _ = _codes(table, shared, self.tables.domains)
        return (table.size / max(1, len(np.unique(code))), table.size)


def _natural_join(left: Table, left_cost: Array, right: Table, right_cost: Array, domains: dict[str, Array]) -> tuple[Table, Array]:
    """Rows of both tables that agree on their shared axes; costs add up."""
    shared = [axis for axis in right.axes if axis in left.axes]
    left_code, _ = _codes(left, shared, domains)
    right_code, _ = _codes(right, shared, domains)
    order = np.argsort(right_code, kind="stable")
    sorted_code = right_code[order]
    start = np.searchsorted(sorted_code, left_code, side="left")
    stop = np.searchsorted(sorted_code, left_code, side="right")
    times = stop - start
    left_rows = np.repeat(np.arange(len(left_code)), times)
    offset = np.arange(len(left_rows)) - np.repeat(np.cumsum(times) - times, times)
    right_rows = order[np.repeat(start, times) + offset]
    values = {axis: column[left_rows] for axis, column in left.values.items()}
    values |= {axis: right.values[axis][right_rows] for axis in right.axes if axis not in values}
    return Table(tuple(values), values), left_cost[left_rows] + right_cost[right_rows]
