"""Rules and cost leaves tabulated over their axes: what the bounds, the join and the CP-SAT model all read.

A table holds the value combinations of a few axes that no rule over those axes forbids, and, a column each, the leaves
that depend on them. Leaves of a narrower scope are columns of the wider table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parsolve.errors import SpecError
from parsolve.evaluation import active_limits, active_rules, objective_tree
from parsolve.functions import AXES, STAGE, Array, Count, Function, Limit, Part, Points, Rule, StageMax, ordered
from parsolve.problem import Instance

MAX_ROWS = 4_000_000
"""A table that would pass this many candidate rows is refused, by name."""
MAX_WIDENING = 1
"""A leaf moves into a wider table when that has at most this many more axes."""
LOOKUP_ROWS = 2_048
"""From this many rows on a look-up table is quicker than a binary search."""
MESH_EXCESS = 3
"""A function is evaluated on the product of its domains where that has at most this many times its table's rows."""
DIRECT_CODES = 1_000_000
"""Values on shared axes are numbered by position up to this many combinations, else by rank among those present."""
MERGED_ROWS = 1_024
"""Tables with common axes become one where that has no more rows than the larger of them, or than this."""
COUNTS_AT_ONCE = 100_000
"""Counts computed at once: (microbatches, cut, slot)."""

Counts = dict[tuple[Count, int | None], Array]
"""A count on every (cut, slot), by the number of microbatches where it depends on that."""


@dataclass
class Table:
    """Rows of values over ``axes``; ``values[axis]`` is an array with a value per row."""

    axes: tuple[str, ...]
    values: dict[str, Array]

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(next(iter(self.values.values()))) if self.axes else 1

    def keep(self, rows: Array) -> Table:
        """The rows where a mask is true, or with the given numbers."""
        return Table(self.axes, {axis: column[rows] for axis, column in self.values.items()})


@dataclass
class Group:
    """Leaves of one quantity that share table, count and sign: ``sign * count * cost[row]``."""

    table: int
    count: Count | None
    sign: int
    cost: Array


@dataclass
class Quantity:
    """A worst-stage sum in tabulated form. ``budget`` None: a summand of the objective."""

    name: str
    groups: list[Group]
    at_least_zero: bool
    budget: float | None = None


@dataclass
class Tables:
    """Everything tabulated for one instance. ``counts`` is shared by all tables of the same list of cuts."""

    p: Instance
    domains: dict[str, Array]
    tables: list[Table]
    objective: list[Quantity] = field(default_factory=list)
    limits: list[Quantity] = field(default_factory=list)
    counts: Counts = field(default_factory=dict)

    def keep(self, alive: Sequence[Array]) -> Tables:
        """The same with some rows of every table, and with the values that these rows still have."""

        def kept(quantity: Quantity) -> Quantity:
            groups = [Group(g.table, g.count, g.sign, g.cost.take(rows[g.table])) for g in quantity.groups]
            return Quantity(quantity.name, groups, quantity.at_least_zero, quantity.budget)

        rows = [np.flatnonzero(mask) for mask in alive]
        tables = [table.keep(some) for table, some in zip(self.tables, rows, strict=True)]
        domains = dict(self.domains)
        for axis, values in self.domains.items():
            held = [table.values[axis] for table in tables if axis in table.axes]
            if held:
                domains[axis] = values[np.isin(values, np.concatenate(held))]
        objective, limits = [kept(q) for q in self.objective], [kept(q) for q in self.limits]
        return Tables(self.p, domains, tables, objective, limits, self.counts)


def apply_rule(rule: Rule, p: Instance, values: Mapping[str, Any], size: int) -> Array:
    """The rule over columns of values, as a mask.

    Raises
    ------
    SpecError: the answer has another shape, or differs when asked again.
    """
    answers = [np.asarray(rule(p, values)) for _ in range(2)]
    if any(answer.shape not in ((), (1,), (size,)) for answer in answers):
        raise SpecError(f"it answers with shape {answers[0].shape} for {size} rows", f"rule {rule.name}")
    if not np.array_equal(answers[0], answers[1]):
        raise SpecError("it gives different answers for the same values", f"rule {rule.name}")
    return np.broadcast_to(answers[0], (size,)).astype(bool)


def tabulate(p: Instance, axes: Sequence[str], domains: Mapping[str, Array], rules: Iterable[Rule]) -> Table:
    """All combinations over ``axes`` that the ``rules`` within them allow, built axis by axis.

    Raises
    ------
    SpecError: the table would be too large, or a rule raised.
    """
    table = Table((), {})
    pending = [rule for rule in rules if set(rule.axes) <= set(axes)]
    for axis in axes:
        domain = domains[axis]
        size = table.size
        if size * len(domain) > MAX_ROWS:
            raise SpecError(f"a function of {', '.join(axes)} needs over {MAX_ROWS} rows; give it fewer axes", "tables")
        values = {name: np.repeat(column, len(domain)) for name, column in table.values.items()}
        values[axis] = np.tile(domain, size)
        table = Table((*table.axes, axis), values)
        ready = [rule for rule in pending if set(rule.axes) <= set(table.axes)]
        for rule in ready:
            table = table.keep(apply_rule(rule, p, table.values, table.size))
        pending = [rule for rule in pending if rule not in ready]
    return table


def row_codes(table: Table, axes: Sequence[str], domains: Mapping[str, Array]) -> Array:
    """Mixed-radix number of each row's values on ``axes``."""
    code = np.zeros(table.size, dtype=np.int64)
    for axis in axes:
        code = code * len(domains[axis]) + _positions(table.values[axis], domains[axis])
    return code


def shared_codes(
    left: Table, right: Table, axes: Sequence[str], domains: Mapping[str, Array]
) -> tuple[Array, Array, int]:
    """Numbers of the rows' values on ``axes``, common to two tables, and how many numbers there are."""
    here, there = (row_codes(table, axes, domains) for table in (left, right))
    size = math.prod(len(domains[axis]) for axis in axes)
    if size > DIRECT_CODES:
        present, number = np.unique(np.concatenate((here, there)), return_inverse=True)
        here, there, size = number[: left.size], number[left.size :], len(present)
    return here, there, size


def _positions(values: Array, domain: Array) -> Array:
    """The place of each value in an ascending domain; by look-up where that is quicker than a search."""
    if len(values) < LOOKUP_ROWS or not len(domain) or domain[-1] > len(values):
        return np.searchsorted(domain, values)
    place = np.zeros(int(domain[-1]) + 1, dtype=np.int64)
    place[domain] = np.arange(len(domain))
    found: Array = place[values]
    return found


class Partners:
    """The rows of ``right`` that agree with each row of ``left`` on their common axes."""

    def __init__(self, left: Table, right: Table, domains: Mapping[str, Array]) -> None:
        self.left, self.right = left, right
        shared = [axis for axis in right.axes if axis in left.axes]
        left_code = row_codes(left, shared, domains)
        right_code = row_codes(right, shared, domains)
        self.order = np.argsort(right_code, kind="stable")
        in_order = right_code[self.order]
        self.start = np.searchsorted(in_order, left_code, side="left")
        self.times = np.searchsorted(in_order, left_code, side="right") - self.start
        self.size = int(self.times.sum())

    def at_most(self, cost: Array, rows: int) -> Array | None:
        """None, or the cheapest rows of ``left`` that together join to at most ``rows`` rows (at least one)."""
        if self.size <= rows:
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


def _joined_size(left: Table, right: Table, domains: Mapping[str, Array]) -> int:
    """Rows of the join of two tables."""
    shared = [axis for axis in right.axes if axis in left.axes]
    here, there, size = shared_codes(left, right, shared, domains)
    return int(np.bincount(here, minlength=size) @ np.bincount(there, minlength=size))


Merges = list[tuple[tuple[str, ...], tuple[str, ...]]]
"""Which tables were joined, by their axes."""


def _join(left: Table, right: Table, domains: Mapping[str, Array]) -> Table:
    """The join of two tables, axes in canonical order."""
    values = Partners(left, right, domains).join()[2].values
    axes = ordered(values)
    return Table(axes, {axis: values[axis] for axis in axes})


def _merge(tables: list[Table], domains: Mapping[str, Array], done: Merges) -> list[Table]:
    """Fewer, wider tables: neighbours that join without growing (much) are joined, the smallest result first.

    ``done`` is filled; when it is not empty, those joins are made and no others looked for.
    """
    if done:
        rest = list(tables)
        for pair in done:
            left, right = (rest.pop([table.axes for table in rest].index(axes)) for axes in pair)
            rest.append(_join(left, right, domains))
        return sorted(rest, key=lambda table: (table.size, table.axes))
    tables = sorted(tables, key=lambda table: (table.size, table.axes))
    sizes: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
    while True:
        best: tuple[int, int, int] | None = None
        for i, left in enumerate(tables):
            for j in range(i):
                right = tables[j]
                if not set(left.axes) & set(right.axes):
                    continue
                name = (left.axes, right.axes)
                if name not in sizes:
                    sizes[name] = _joined_size(left, right, domains)
                size = sizes[name]
                if size <= max(left.size, MERGED_ROWS) and (best is None or size < best[0]):
                    best = (size, i, j)
        if best is None:
            return tables
        _, i, j = best
        done.append((tables[i].axes, tables[j].axes))
        joined = _join(tables[i], tables[j], domains)
        tables = [table for k, table in enumerate(tables) if k not in (i, j)]
        tables = sorted([*tables, joined], key=lambda table: (table.size, table.axes))


def _scopes(axes: Iterable[str], quantities: Iterable[StageMax], rules: Iterable[Rule]) -> list[tuple[str, ...]]:
    """Axis sets of the tables: those of leaves, of rules that fit into no leaf's, and every axis at least once."""
    wanted: set[tuple[str, ...]] = {(axis,) for axis in axes}
    wanted |= {ordered(part.axes) for quantity in quantities for part in quantity.parts}
    wanted |= {rule.axes for rule in rules}
    kept: list[tuple[str, ...]] = []
    for scope in sorted(wanted, key=lambda a: (-len(a), a)):
        if not any(set(scope) <= set(wide) and len(wide) - len(scope) <= _widening(scope) for wide in kept):
            kept.append(scope)
    return kept


def _widening(axes: tuple[str, ...]) -> int:
    """Narrow scopes fit anywhere; wide ones only into tables that are hardly wider."""
    return 6 if len(axes) <= 1 else (2 if len(axes) <= 3 else MAX_WIDENING)


_DIMENSION = {axis: i for i, axis in enumerate(AXES)}


class Leaves:
    """Leaves over the rows of tables.

    Built-in functions are evaluated once, on the product of the domains of their axes, one array dimension each, so
    that what depends on few axes is computed on few numbers. The user's own get columns of rows, as do functions whose
    product is much larger than their table.
    """

    def __init__(self, p: Instance, domains: Mapping[str, Array], tables: Sequence[Table]) -> None:
        self.p, self.domains, self.tables = p, domains, tables
        self.own = {*p.problem.terms, *(part.term for x in p.problem.limits for part in x.quantity(p).parts)}
        each = {axis: i for i, axis in enumerate(AXES) if axis in domains}
        shapes = {axis: [-1 if k == i else 1 for k in range(len(AXES))] for axis, i in each.items()}
        self.mesh = Points(p, {axis: domains[axis].reshape(shape) for axis, shape in shapes.items()})
        self.places: dict[tuple[int, tuple[str, ...]], Array] = {}

    def fits(self, axes: Iterable[str]) -> int | None:
        """The smallest table with these axes, None when no table has them all."""
        wanted = set(axes)
        holders = [i for i, table in enumerate(self.tables) if wanted <= set(table.axes)]
        return min(holders, key=lambda i: (self.tables[i].size, i), default=None)

    def quantity(self, quantity: StageMax, budget: float | None, weight: float = 1.0) -> Quantity:
        """A worst-stage sum over the tables, each leaf on the smallest table with its axes.

        Raises
        ------
        KeyError: no table has the axes of a part.
        """
        groups: dict[tuple[int, Count | None, int], Group] = {}
        columns: dict[tuple[Function, int], Array] = {}
        for part in quantity.parts:
            index = self.fits(part.axes)
            if index is None:
                raise KeyError(part.axes)
            cost = weight * self._leaf(part, index, columns)
            key = (index, part.count, part.sign)
            if key in groups:
                groups[key].cost = groups[key].cost + cost
            else:
                groups[key] = Group(index, part.count, part.sign, np.array(cost))
        live = [group for group in groups.values() if group.cost.any()]
        return Quantity(quantity.name, live, quantity.at_least_zero, budget)

    def _leaf(self, part: Part, index: int, columns: dict[tuple[Function, int], Array]) -> Array:
        """A cost per row, finite and not negative. ``columns``: of functions on tables that several parts have.

        Raises
        ------
        SpecError: it is not.
        """

        def column(function: Function) -> Array:
            if (function, index) not in columns:
                columns[function, index] = self._function(function, self.tables[index])
            return columns[function, index]

        cost = column(part.term)
        if part.weight is not None:
            cost = cost * column(part.weight)
        if cost.size and not (cost.min() >= 0 and cost.max() < math.inf):
            raise SpecError("it must be finite and not negative for every row of its axes", f"term {part.term.name}")
        return cost

    def _function(self, function: Function, table: Table) -> Array:
        product = math.prod(len(self.domains[axis]) for axis in function.axes)
        if function in self.own or product > MESH_EXCESS * table.size:
            return np.broadcast_to(np.asarray(function(self.p, table.values), dtype=float), (table.size,))
        value = np.asarray(function(self.p, self.mesh), dtype=float)
        axes = tuple(axis for axis in function.axes if value.ndim and value.shape[_DIMENSION[axis]] > 1)
        if not axes:
            return np.broadcast_to(value.ravel(), (table.size,))
        return value.take(self._place(table, axes))

    def _place(self, table: Table, axes: tuple[str, ...]) -> Array:
        """Where each row stands in the product of the domains of some axes."""
        name = (id(table), axes)
        if name not in self.places:
            self.places[name] = row_codes(table, axes, self.domains)
        return self.places[name]


def build_tables(
    p: Instance,
    domains: dict[str, Array],
    objective: bool = True,
    counts: Counts | None = None,
    room: Iterable[Rule | Limit] = (),
    merges: Merges | None = None,
) -> Tables:
    """Tabulate the rules of ``p``'s problem as row masks and the leaves as columns.

    ``counts``: those of an instance of the same problem with the same list of cuts. ``room``: rules and limits that do
    not hold here, but whose axes shall fit into a table. ``merges``: those of another batch size, or a list to fill.
    """
    active, held = active_rules(p.problem), active_limits(p.problem)
    summands = objective_tree(p) if objective else []
    later = list(room)
    amounts = [x.quantity(p) for x in (*held, *(x for x in later if isinstance(x, Limit)))]
    wanted = [*active, *(x for x in later if isinstance(x, Rule))]
    scopes = _scopes(domains, [*(q for _, q in summands), *amounts], wanted)
    tables = _merge([tabulate(p, axes, domains, active) for axes in scopes], domains, [] if merges is None else merges)
    result = Tables(p, domains, tables, counts={} if counts is None else counts)
    leaves = Leaves(p, domains, tables)
    result.objective = [leaves.quantity(quantity, None, weight) for weight, quantity in summands]
    result.objective = [q for q in result.objective if any(group.sign > 0 for group in q.groups)]
    result.limits = [leaves.quantity(limit.quantity(p), float(limit.budget(p))) for limit in held]
    return result


def _add_counts(tables: Tables, count: Count, depths: Sequence[int | None]) -> None:
    """Add to the counts those of every (cut, slot) at some numbers of microbatches, a few at once."""
    p = tables.p
    shape = (len(p.splits.cuts), p.splits.slots)
    at_once = max(1, COUNTS_AT_ONCE // max(1, math.prod(shape)))
    missing = [depth for depth in depths if (count, depth) not in tables.counts]
    for start in range(0, len(missing), at_once):
        some = missing[start : start + at_once]
        depth = None if some == [None] else np.array(some).reshape(-1, 1, 1)
        here = {"split": np.arange(shape[0])[:, None], "grad_acc": depth, STAGE: np.arange(shape[1])}
        found = np.broadcast_to(np.asarray(count(p, here), dtype=float), (len(some), *shape))
        tables.counts |= {(count, m): found[i] for i, m in enumerate(some)}


def coefficients(tables: Tables, quantity: Quantity, splits: Array, depths: Array) -> Array:
    """Counts of each group: array (depth, split, slot, group) for cuts ``splits`` and microbatch counts ``depths``.

    Groups without a count have 1 everywhere.
    """
    result = np.ones((len(depths), len(splits), tables.p.splits.slots, len(quantity.groups)))
    for i, group in enumerate(quantity.groups):
        if group.count is None:
            continue
        numbers = depths.tolist() if "grad_acc" in group.count.axes else [None]
        _add_counts(tables, group.count, numbers)
        for j, depth in enumerate(numbers):
            result[slice(None) if depth is None else j, :, :, i] = tables.counts[group.count, depth][splits]
    return result


def uses_grad_acc(quantity: Quantity) -> bool:
    """True when some count depends on the number of microbatches."""
    return any(group.count is not None and "grad_acc" in group.count.axes for group in quantity.groups)
