"""Rules and cost leaves tabulated over their axes: what the bounds, the join and the CP-SAT model all read.

A table holds the value combinations of a few axes that no rule over those axes forbids, and, a column each, the leaves
that depend on them. Leaves of a narrower scope are columns of the wider table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parsolve.errors import SpecError
from parsolve.evaluation import active_limits, active_rules, objective_tree
from parsolve.functions import STAGE, Array, Count, Limit, Rule, StageMax, ordered
from parsolve.problem import Instance

MAX_ROWS = 4_000_000
"""A table that would pass this many candidate rows is refused, by name."""
MAX_WIDENING = 1
"""A leaf moves into a wider table when that has at most this many more axes."""


@dataclass
class Table:
    """Rows of values over ``axes``; ``values[axis]`` is an array with a value per row."""

    axes: tuple[str, ...]
    values: dict[str, Array]

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(next(iter(self.values.values()))) if self.axes else 1

    def keep(self, mask: Array) -> Table:
        """The rows where ``mask`` is true."""
        return Table(self.axes, {axis: column[mask] for axis, column in self.values.items()})


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
    """Everything tabulated for one instance."""

    p: Instance
    domains: dict[str, Array]
    tables: list[Table]
    objective: list[Quantity] = field(default_factory=list)
    limits: list[Quantity] = field(default_factory=list)


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


def _tabulated(
    p: Instance, quantity: StageMax, tables: list[Table], budget: float | None, weight: float = 1.0
) -> Quantity:
    groups: dict[tuple[int, Count | None, int], Group] = {}
    for part in quantity.parts:
        fits = [i for i, table in enumerate(tables) if set(part.axes) <= set(table.axes)]
        index = min(fits, key=lambda i: (len(tables[i].axes), i))
        table = tables[index]
        cost = np.broadcast_to(np.asarray(part.leaf(p, table.values), dtype=float), (table.size,))
        if not (np.isfinite(cost).all() and (cost >= 0).all()):
            raise SpecError("it must be finite and not negative for every row of its axes", f"term {part.term.name}")
        cost = weight * cost
        key = (index, part.count, part.sign)
        if key in groups:
            groups[key].cost = groups[key].cost + cost
        else:
            groups[key] = Group(index, part.count, part.sign, np.array(cost))
    live = [group for group in groups.values() if group.cost.any()]
    return Quantity(quantity.name, live, quantity.at_least_zero, budget)


def build_tables(
    p: Instance,
    domains: dict[str, Array],
    rules: Iterable[Rule] | None = None,
    limits: Iterable[Limit] | None = None,
    objective: bool = True,
) -> Tables:
    """Tabulate the rules as row masks and the leaves as columns."""
    active = tuple(active_rules(p.problem) if rules is None else rules)
    held = tuple(active_limits(p.problem) if limits is None else limits)
    summands = objective_tree(p) if objective else []
    budgets = [(limit.quantity(p), float(limit.budget(p))) for limit in held]
    scopes = _scopes(domains, [*(q for _, q in summands), *(q for q, _ in budgets)], active)
    tables = [tabulate(p, axes, domains, active) for axes in scopes]
    result = Tables(p, domains, tables)
    result.objective = [_tabulated(p, quantity, tables, None, weight) for weight, quantity in summands]
    result.objective = [q for q in result.objective if any(group.sign > 0 for group in q.groups)]
    result.limits = [_tabulated(p, quantity, tables, budget) for quantity, budget in budgets]
    return result


def coefficients(p: Instance, quantity: Quantity, splits: Array, grad_acc: Array) -> Array:
    """Counts of each group: array (split, slot, group), for cuts ``splits`` at microbatch counts ``grad_acc``.

    ``grad_acc`` broadcasts against ``splits``; groups without a count have 1 everywhere.
    """
    shape = (len(splits), p.splits.slots)
    result = np.empty((*shape, len(quantity.groups)))
    here = {"split": splits[:, None], "grad_acc": np.asarray(grad_acc)[..., None], STAGE: np.arange(shape[1])[None, :]}
    for i, group in enumerate(quantity.groups):
        result[:, :, i] = 1.0 if group.count is None else np.broadcast_to(group.count(p, here), shape)
    return result


def uses_grad_acc(quantity: Quantity) -> bool:
    """True when some count depends on the number of microbatches."""
    return any(group.count is not None and "grad_acc" in group.count.axes for group in quantity.groups)
