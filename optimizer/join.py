"""The join of the surviving rows: every full assignment whose lower bound stays within the bound and the budgets.

Tables are joined one after the other. After each step every worst-stage sum is bounded from below for every partial
assignment: leaves of joined tables at their value, the others at their cheapest; counts of the cut when it is known,
else the least counts of any cut with the known pipeline size (and, where layers may be recomputed, the known number of
chunks and of recomputed layers). At the end the bound is the cost itself, so a join that
was not cut off is an exact enumeration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parsolve.functions import Array
from parsolve.optimizer.bounds import Filter
from parsolve.optimizer.tables import Partners, Quantity, Table, coefficients, row_codes, uses_grad_acc

SLACK = 1e-9
SHAPE = {"pp": "pp", "vpp": "vpp", "recompute_layers": "recomputed"}
"""Axes that a cut implies, and what ``Splits`` calls them."""
LATE = ("split", "recompute_layers")
AT_ONCE = 512
"""Partial assignments whose bounds are computed at once."""
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
        self.quantity = quantity
        self.tables = {group.table for group in quantity.groups}
        self.cheapest = np.array([work.cheapest(group) for group in quantity.groups])
        self.dearest = np.array([float(g.cost[work.alive[g.table]].max()) for g in quantity.groups])
        self.signs = np.array([group.sign for group in quantity.groups])
        self.depth_matters = uses_grad_acc(quantity)
        self.depths = work.axis_values("grad_acc") if self.depth_matters else work.axis_values("grad_acc")[:1]
        self.splits = work.axis_values("split")
        splits = work.tables.p.splits
        shape = SHAPE if splits.with_recomputation else {"pp": "pp"}
        self.shape = {axis: getattr(splits, of)[self.splits] for axis, of in shape.items()}
        self.by_split = coefficients(work.tables, quantity, self.splits, self.depths)
        mean = np.einsum("sr,dsrg->dsg", splits.weight[self.splits], self.by_split)
        self.both = np.concatenate((self.by_split, mean[:, :, None, :]), axis=2)
        self.known: dict[tuple[str, ...], tuple[list[Array], Array, Array]] = {}

    def changed_by(self, index: int, axes: set[str]) -> bool:
        """Whether joining a table that brings new ``axes`` can raise the bound."""
        known = {"split", "grad_acc", *self.shape} if self.depth_matters else {"split", *self.shape}
        return index in self.tables or bool(axes & known)

    def _least(self, axes: tuple[str, ...]) -> tuple[list[Array], Array, Array]:
        """Least counts (most of what is taken off) of all cuts that agree on some axes.

        Their values, ascending; a number for each combination of them; counts (depth, combination, slot, group).
        """
        if axes not in self.known:
            values = [np.unique(self.shape[axis]) for axis in axes]
            code = np.zeros(len(self.splits), dtype=np.int64)
            for axis, of in zip(axes, values, strict=True):
                code = code * len(of) + np.searchsorted(of, self.shape[axis])
            order = np.argsort(code, kind="stable")
            codes, first = np.unique(code[order], return_index=True)
            both = self.both[:, order]
            least, most = np.minimum.reduceat(both, first, axis=1), np.maximum.reduceat(both, first, axis=1)
            self.known[axes] = values, codes, np.where(self.signs > 0, least, most)
        return self.known[axes]

    def _counts(self, table: Table) -> tuple[Array, Array, Array | None]:
        """Counts (depth, number, slot, group), each partial assignment's number, and where no cut has its shape."""
        if "split" in table.values:
            return self.by_split, np.searchsorted(self.splits, table.values["split"]), None
        axes = tuple(axis for axis in self.shape if axis in table.values)
        values, codes, counts = self._least(axes)
        code = np.zeros(table.size, dtype=np.int64)
        missing = np.zeros(table.size, dtype=bool)
        for axis, of in zip(axes, values, strict=True):
            at = np.minimum(np.searchsorted(of, table.values[axis]), len(of) - 1)
            missing |= of[at] != table.values[axis]
            code = code * len(of) + at
        at = np.minimum(np.searchsorted(codes, code), len(codes) - 1)
        missing |= codes[at] != code
        return counts, at, missing

    def of(self, table: Table, rows: dict[int, Array]) -> Array:
        """Lower bound for each partial assignment; infinite where no cut has its pipeline size."""
        size = table.size
        leaves = np.empty((size, len(self.quantity.groups)))
        for i, group in enumerate(self.quantity.groups):
            if group.table in rows:
                leaves[:, i] = group.cost[rows[group.table]]
            else:
                leaves[:, i] = self.cheapest[i] if group.sign > 0 else self.dearest[i]
        leaves *= self.signs
        at_depth: Array = np.zeros(size, dtype=np.int64)
        if self.depth_matters and "grad_acc" in table.values:
            at_depth = np.searchsorted(self.depths, table.values["grad_acc"])
        counts, at, missing = self._counts(table)
        worst = np.empty(size)
        for start in range(0, size, AT_ONCE):  # small enough for the processor's cache
            here = slice(start, start + AT_ONCE)
            worst[here] = np.einsum("nrg,ng->nr", counts[at_depth[here], at[here]], leaves[here]).max(axis=1)
        if self.quantity.at_least_zero:
            worst = np.maximum(worst, 0.0)
        if missing is not None:
            worst[missing] = np.inf
        return worst


def join(work: Filter, limit: float, max_rows: int) -> Joined:
    """Join the surviving rows of ``work`` under ``limit``.

    When more than ``max_rows`` partial assignments are open the cheapest are kept (without an objective: those that use
    the least of their budgets), so the result is still a sample.
    """
    tables, domains = work.tables, work.tables.domains
    live = [table.keep(mask) for table, mask in zip(tables.tables, work.alive, strict=True)]
    index = [np.flatnonzero(mask) for mask in work.alive]
    bounds = [_Bound(work, quantity) for quantity in (*tables.limits, *tables.objective)]
    values: list[Array | None] = [None] * len(bounds)
    current, complete = Table((), {}), True
    rows: dict[int, Array] = {i: np.zeros(1, dtype=np.int64) for i, table in enumerate(live) if not table.axes}
    cost, use = np.zeros(1), np.zeros(1)
    todo = [i for i, table in enumerate(live) if table.axes]

    def choose(kept: Array) -> None:
        nonlocal current, rows, cost, use, values
        current, rows, cost, use = current.keep(kept), {k: at[kept] for k, at in rows.items()}, cost[kept], use[kept]
        values = [None if value is None else value[kept] for value in values]

    distinct: dict[tuple[int, tuple[str, ...]], int] = {}

    def growth(k: int) -> tuple[float, int]:
        """Expected growth by joining a table: its rows divided by the combinations of shared axes.

        Connected tables come first and cuts last: until then the least counts of the pipeline size bound well. The
        number of chunks alone bounds nothing that the cut does not.
        """
        table = live[k]
        shared = tuple(axis for axis in table.axes if axis in current.values)
        if current.axes and not shared:
            return (1e9 + table.size, table.size)
        if (k, shared) not in distinct:
            distinct[k, shared] = max(1, len(np.unique(row_codes(table, shared, domains))))
        brought = set(table.axes).difference(shared)
        late = bool(brought.intersection(LATE)) or brought == {"vpp"}
        return (table.size / distinct[k, shared] * (1e3 if late else 1), table.size)

    def add(table: Table, i: int | None) -> None:
        """Join a table, the ``i``-th or what some of its axes can be, and drop what the bounds exclude."""
        nonlocal current, complete, cost, use
        partners = Partners(current, table, domains)
        few = partners.at_most(cost if tables.objective else use, EXPANSION * max_rows)
        if few is not None:
            complete = False
            choose(few)
            partners = Partners(current, table, domains)
        left, right, joined = partners.join()
        brought = set(joined.axes) - set(current.axes)
        choose(left)
        current = joined
        if i is not None:
            rows[i] = index[i][right]
        for k, bound in enumerate(bounds):
            value = values[k]
            if value is not None and not bound.changed_by(-1 if i is None else i, brought):
                continue
            values[k] = value = bound.of(current, rows)
            budget = bound.quantity.budget
            kept = value <= (limit if budget is None else budget) * (1 + SLACK)
            if not kept.all():
                choose(kept)
        cost, use = np.zeros(current.size), np.zeros(current.size)
        for bound, value in zip(bounds, values, strict=True):
            if value is not None and bound.quantity.budget is None:
                cost = cost + value
            elif value is not None:
                use = use + value / max(bound.quantity.budget or 0.0, 1e-9)
        kept = cost <= limit * (1 + SLACK)
        if current.size and int(kept.sum()) > max_rows:
            complete = False
            order = cost if tables.objective else use
            kept &= order <= np.partition(order, max_rows)[max_rows]
        if not kept.all():
            choose(kept)

    while todo:
        i = min(todo, key=growth)
        todo.remove(i)
        if "split" in live[i].axes and "recompute_layers" in live[i].axes:  # first how many layers, then which cut
            add(_projected(live[i], tuple(SHAPE), domains), None)
        add(live[i], i)
    return Joined(current, cost, complete, limit)


def _projected(table: Table, axes: tuple[str, ...], domains: Mapping[str, Array]) -> Table:
    """The combinations that some axes of a table have."""
    held = tuple(axis for axis in axes if axis in table.axes)
    _, first = np.unique(row_codes(table, held, domains), return_index=True)
    return Table(held, {axis: table.values[axis][first] for axis in held})
