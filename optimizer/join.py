"""The join of the surviving rows: every full assignment whose lower bound stays within the bound and the budgets.

Tables are joined one after the other. After each step every worst-stage sum is bounded from below for every partial
assignment: leaves of joined tables at their value, the others at their cheapest; counts of the cut when it is known,
else the least counts of any cut with the known pipeline size. At the end the bound is the cost itself, so a join that
was not cut off is an exact enumeration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parsolve.functions import Array
from parsolve.optimizer.bounds import Filter, row_codes
from parsolve.optimizer.tables import Quantity, Table, coefficients, uses_grad_acc

SLACK = 1e-9
EXPANSION = 8
"""A join may grow to this many times the row cap before bounds cut it down again."""


@dataclass
class Joined:
    """Assignments with a lower bound of their objective; ``complete`` unless cut off at the cheapest ones."""

    table: Table
    cost: Array
    complete: bool
    limit: float


class _Bound:
    """Lower bounds of one worst-stage sum for partial assignments."""

    def __init__(self, work: Filter, quantity: Quantity) -> None:
        self.work, self.quantity, self.p = work, quantity, work.tables.p
        self.cheapest = np.array([work.cheapest(group) for group in quantity.groups])
        self.dearest = np.array([float(g.cost[work.alive[g.table]].max()) for g in quantity.groups])
        self.signs = np.array([group.sign for group in quantity.groups])
        self.depth_matters = uses_grad_acc(quantity)
        self.depths = np.unique(work.axis_values("grad_acc"))
        self.splits = work.axis_values("split")
        ranks = work.tables.domains["pp"]
        depths = self.depths if self.depth_matters else self.depths[:1]
        weight = self.p.splits.weight[self.splits]
        of_split = self.p.splits.pp[self.splits]
        slots = self.p.splits.slots
        self.by_split = np.zeros((len(depths), len(self.splits), slots, len(quantity.groups)))
        self.by_pp = np.zeros((len(depths), len(ranks), slots + 1, len(quantity.groups)))
        for i, depth in enumerate(depths):
            counts = coefficients(self.p, quantity, self.splits, np.array([depth]))
            self.by_split[i] = counts
            mean = np.einsum("sr,srg->sg", weight, counts)
            both = np.concatenate((counts, mean[:, None, :]), axis=1)
            for j, pp in enumerate(ranks):
                here = both[of_split == pp]
                if len(here):
                    self.by_pp[i, j] = np.where(self.signs > 0, here.min(axis=0), here.max(axis=0))

    def of(self, table: Table, rows: dict[int, Array]) -> Array:
        """Lower bound for each partial assignment."""
        size = table.size
        values = []
        for i, group in enumerate(self.quantity.groups):
            known = group.table in rows
            if known:
                values.append(group.cost[rows[group.table]])
            else:
                values.append(np.full(size, self.cheapest[i] if group.sign > 0 else self.dearest[i]))
        leaves = np.stack(values, axis=1) * self.signs if values else np.zeros((size, 0))
        at_depth: Array = np.zeros(size, dtype=np.int64)
        if self.depth_matters and "grad_acc" in table.values:
            at_depth = np.searchsorted(self.depths, table.values["grad_acc"])
        if "split" in table.values:
            counts = self.by_split[at_depth, np.searchsorted(self.splits, table.values["split"])]
        elif "pp" in table.values:
            at_pp = np.searchsorted(self.work.tables.domains["pp"], table.values["pp"])
            counts = self.by_pp[at_depth, at_pp]
        else:
            present = np.isin(self.work.tables.domains["pp"], self.work.axis_values("pp"))
            least, most = self.by_pp[:, present].min(axis=1), self.by_pp[:, present].max(axis=1)
            counts = np.where(self.signs > 0, least, most)[at_depth]
        worst: Array = np.einsum("nrg,ng->nr", counts, leaves).max(axis=1)
        return np.maximum(worst, 0.0) if self.quantity.at_least_zero else worst


def join(work: Filter, limit: float, max_rows: int) -> Joined:
    """Join the surviving rows of ``work`` under ``limit``.

    When more than ``max_rows`` partial assignments are open the cheapest are kept, so the result is still a sample.
    """
    tables, domains = work.tables, work.tables.domains
    live = [table.keep(mask) for table, mask in zip(tables.tables, work.alive, strict=True)]
    index = [np.flatnonzero(mask) for mask in work.alive]
    objective = [_Bound(work, quantity) for quantity in tables.objective]
    budgets = [_Bound(work, quantity) for quantity in tables.limits]
    current, rows, complete = Table((), {}), {}, True
    rows = {i: np.zeros(1, dtype=np.int64) for i, table in enumerate(live) if not table.axes}
    cost = np.zeros(1)
    todo = [i for i, table in enumerate(live) if table.axes]
    while todo:
        i = min(todo, key=lambda k: _growth(current, live[k], domains))
        todo.remove(i)
        partners = _Partners(current, live[i], domains)
        few = partners.at_most(cost, EXPANSION * max_rows)
        if few is not None:
            complete = False
            current, rows, cost = current.keep(few), {k: at[few] for k, at in rows.items()}, cost[few]
            partners = _Partners(current, live[i], domains)
        left, right, current = partners.join()
        rows = {k: at[left] for k, at in rows.items()}
        rows[i] = index[i][right]
        for bound in budgets:
            keep = bound.of(current, rows) <= (bound.quantity.budget or 0.0) * (1 + SLACK)
            current, rows = current.keep(keep), {k: at[keep] for k, at in rows.items()}
        cost = np.sum([bound.of(current, rows) for bound in objective], axis=0) if objective else np.zeros(current.size)
        keep = cost <= limit * (1 + SLACK)
        if current.size and int(keep.sum()) > max_rows:
            complete = False
            keep &= cost <= np.partition(cost, max_rows)[max_rows]
        current, rows, cost = current.keep(keep), {k: at[keep] for k, at in rows.items()}, cost[keep]
    return Joined(current, cost, complete, limit)


def _growth(current: Table, table: Table, domains: dict[str, Array]) -> tuple[float, int]:
    """Expected growth of joining a table: its rows divided by the combinations of shared axes.

    Connected tables come first and cuts last: until then the least counts of the pipeline size bound well.
    """
    shared = [axis for axis in table.axes if axis in current.axes]
    if current.axes and not shared:
        return (1e9 + table.size, table.size)
    growth = table.size / max(1, len(np.unique(row_codes(table, shared, domains)[0])))
    return (growth * (1e3 if "split" in table.axes and "split" not in current.axes else 1), table.size)


class _Partners:
    """The rows of a table that agree with each partial assignment on their shared axes."""

    def __init__(self, left: Table, right: Table, domains: dict[str, Array]) -> None:
        self.left, self.right = left, right
        shared = [axis for axis in right.axes if axis in left.axes]
        left_code, _ = row_codes(left, shared, domains)
        right_code, _ = row_codes(right, shared, domains)
        self.order = np.argsort(right_code, kind="stable")
        in_order = right_code[self.order]
        self.start = np.searchsorted(in_order, left_code, side="left")
        self.times = np.searchsorted(in_order, left_code, side="right") - self.start

    def at_most(self, cost: Array, rows: int) -> Array | None:
        """None, or the cheapest partial assignments that together join to at most ``rows`` rows (at least one)."""
        if int(self.times.sum()) <= rows:
            return None
        order = np.argsort(cost, kind="stable")
        last = max(1, int(np.searchsorted(np.cumsum(self.times[order]), rows)))
        kept: Array = np.sort(order[:last])
        return kept

    def join(self) -> tuple[Array, Array, Table]:
        """Row numbers of both sides, and the joined rows."""
        left_rows = np.repeat(np.arange(len(self.times)), self.times)
        offset = np.arange(len(left_rows)) - np.repeat(np.cumsum(self.times) - self.times, self.times)
        right_rows = self.order[np.repeat(self.start, self.times) + offset]
        values = {axis: column[left_rows] for axis, column in self.left.values.items()}
        values |= {axis: self.right.values[axis][right_rows] for axis in self.right.axes if axis not in values}
        return left_rows, right_rows, Table(tuple(values), values)
