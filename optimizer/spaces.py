"""Tables shared by many questions about one problem: more rules, more limits, another goal.

A conflict, a counterfactual or a Pareto front asks the same model again and again with a few rules more. A rule over
the axes of a table is a mask on its rows, a limit or a goal is a set of columns, so the tables, and the counts of the
cuts, are built once for each batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from parsolve.evaluation import active_limits, active_rules, objective_tree
from parsolve.functions import Array, Limit, Rule, ordered
from parsolve.optimizer import domains as domain_module
from parsolve.optimizer.bounds import INFINITE, Filter
from parsolve.optimizer.join import join
from parsolve.optimizer.tables import (
    Counts,
    Leaves,
    Merges,
    Partners,
    Quantity,
    Table,
    Tables,
    apply_rule,
    build_tables,
)
from parsolve.problem import Goal, Instance, Problem
from parsolve.specs import Recompute
from parsolve.splits import Splits

OF_LAYERS = {"recompute", "recompute_layers"}
REACH_ROWS = 150_000
"""Assignments of recompute=block joined before they get their numbers of layers; of more none is dropped."""


@dataclass
class Space:
    """What one question looks at: an instance, its domains, and the surviving rows (None: nothing is left).

    ``rows`` are without recompute=block, whose are in ``partly``: with costs as if no layer were recomputed and memory
    as if all were, until ``with_layers`` gives them every number of layers.
    """

    p: Instance
    domains: dict[str, Array]
    rows: Filter | None
    partly: Filter | None = None

    def with_layers(self, bound: float = INFINITE, sample: int = 0) -> tuple[Instance, Filter] | None:
        """The rows of recompute=block under a bound, their cuts with every number of recomputed layers.

        ``sample``: only what so many of the cheapest assignments use.
        """
        rows = self.partly.copy() if self.partly is not None else None
        if rows is None or not rows.reduce(bound) or not _keep_in_reach(rows, bound, sample):
            return None
        found = Filter(_with_layers(self.p, rows.compact().tables))
        return (found.tables.p, found.compact()) if found.reduce(bound) else None

    @property
    def without_values(self) -> bool:
        """Whether some axis has no value left, so that no table is needed."""
        return any(len(values) == 0 for values in self.domains.values())

    def parts(self) -> Iterator[tuple[Instance, Filter]]:
        """Both parts, the second built when it is asked for."""
        if self.rows is not None:
            yield self.p, self.rows
        partly = self.with_layers()
        if partly is not None:
            yield partly


@dataclass
class _Shared:
    """All rows of a space, with what later questions added to them."""

    space: Space
    whole: Filter
    masks: dict[Rule, tuple[int, Array]] = field(default_factory=dict)
    limits: dict[Limit, Quantity] = field(default_factory=dict)
    goals: dict[Goal, list[Quantity]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> Filter | None:
        """Those that some plan has, None when there is none."""
        rows = self.whole.copy()
        return rows.compact() if rows.reduce() else None

    @cached_property
    def leaves(self) -> Leaves:
        """Leaves of these rows."""
        assert self.rows is not None
        tables = self.rows.tables
        return Leaves(self.space.p, tables.domains, tables.tables)


class Spaces:
    """The spaces of a problem, and of any problem that differs from it by added rules and limits or by its goal."""

    def __init__(
        self,
        problem: Problem,
        objective: bool = True,
        room: Iterable[Rule | Limit] = (),
        domains: Mapping[str, tuple[int, ...]] | None = None,
        any_cut: bool = False,
    ) -> None:
        """``objective``: False when only feasibility is asked. ``room``: rules and limits to be added later.

        ``domains`` replace those of the batch. ``any_cut``: with all cuts at once instead of those that can be listed.
        """
        self.problem, self.objective, self.room, self.domains = problem, objective, tuple(room), domains
        self.any_cut = any_cut
        self.any: Spaces | None = None
        self.shared: dict[int, _Shared | Space] = {}
        self.counts: dict[int, tuple[Splits, Counts]] = {}
        self.merges: Merges = []

    def with_any_cut(self) -> Spaces:
        """The spaces of the same problem with all cuts at once."""
        if self.any is None:
            self.any = Spaces(self.problem, self.objective, self.room, self.domains, any_cut=True)
        return self.any

    def _build(self, problem: Problem, gbs: int) -> Space:
        """The instance and its domains, without tables."""
        return Space(*domain_module.build(problem, gbs, self.domains, self.any_cut), None)

    def once(self, problem: Problem, gbs: int, bound: float = INFINITE) -> Space:
        """The space of a problem at one batch size, built for it alone; rows above the bound are dropped."""
        space = self._build(problem, gbs)
        if space.without_values:
            return space
        return _in_parts(space, self._whole(space), bound)

    def _whole(self, space: Space) -> Filter:
        """All rows of a space, tabulated."""
        _, counts = self.counts.setdefault(id(space.p.splits), (space.p.splits, {}))
        return Filter(build_tables(space.p, space.domains, self.objective, counts, self.room, self.merges))

    def at(self, problem: Problem, gbs: int, bound: float = INFINITE) -> Space:
        """The space of a problem at one batch size, on shared tables where they have all axes that are needed."""
        if not self._narrows(problem):
            return Spaces(problem, self.objective, any_cut=self.any_cut).once(problem, gbs, bound)
        if gbs not in self.shared:
            asked = self._build(problem, gbs)
            if asked.without_values:
                return asked
            space = self._build(self.problem, gbs)
            self.shared[gbs] = space if space.without_values else _Shared(space, self._whole(space))
        base = self.shared[gbs]
        if isinstance(base, _Shared) and problem is self.problem:
            return _in_parts(base.space, base.whole.copy(), bound)
        if isinstance(base, Space) or base.rows is None:
            space = base if isinstance(base, Space) else base.space
            return replace(space, p=problem.instance(gbs, space.p.splits))
        try:
            rows = self._narrowed(base, base.rows, problem)
        except KeyError:
            return self.once(problem, gbs, bound)
        p = problem.instance(gbs, base.space.p.splits)
        return _in_parts(replace(base.space, p=p), rows, bound)

    def _narrows(self, problem: Problem) -> bool:
        """Whether the problem differs from this one by its goal and by added rules and limits alone."""
        mine = self.problem
        same = ("cluster", "model", "workload", "profile", "terms")
        return (
            all(getattr(problem, name) is getattr(mine, name) for name in same)
            and set(active_rules(mine)) <= set(active_rules(problem))
            and set(active_limits(mine)) <= set(active_limits(problem))
        )

    def _narrowed(self, base: _Shared, whole: Filter, problem: Problem) -> Filter:
        """The shared rows that the problem's own rules allow, with its limits and its goal.

        Raises
        ------
        KeyError: some function's axes are in no table.
        """
        own_rules, own_limits = set(active_rules(self.problem)), set(active_limits(self.problem))
        added = [limit for limit in active_limits(problem) if limit not in own_limits]
        if added or (self.objective and problem.goal != self.problem.goal):
            tables = replace(
                whole.tables, limits=[*whole.tables.limits, *(self._limit(base, problem, x) for x in added)]
            )
            if self.objective and problem.goal != self.problem.goal:
                tables.objective = self._goal(base, problem)
            rows = Filter(tables, whole.links)
        else:
            rows = whole.copy()
        for rule in active_rules(problem):
            if rule not in own_rules:
                index, mask = self._mask(base, rule)
                rows.alive[index] &= mask
        return rows

    def _limit(self, base: _Shared, problem: Problem, limit: Limit) -> Quantity:
        if limit not in base.limits:
            p = problem.instance(base.space.p.gbs, base.space.p.splits)
            base.limits[limit] = base.leaves.quantity(limit.quantity(p), float(limit.budget(p)))
        return base.limits[limit]

    def _goal(self, base: _Shared, problem: Problem) -> list[Quantity]:
        if problem.goal not in base.goals:
            p = problem.instance(base.space.p.gbs, base.space.p.splits)
            found = [base.leaves.quantity(quantity, None, weight) for weight, quantity in objective_tree(p)]
            base.goals[problem.goal] = [q for q in found if any(group.sign > 0 for group in q.groups)]
        return base.goals[problem.goal]

    def _mask(self, base: _Shared, rule: Rule) -> tuple[int, Array]:
        if rule not in base.masks:
            index = base.leaves.fits(rule.axes)
            if index is None:
                raise KeyError(rule.axes)
            table = base.leaves.tables[index]
            base.masks[rule] = index, apply_rule(rule, base.space.p, table.values, table.size)
        return base.masks[rule]


def _in_parts(space: Space, rows: Filter, bound: float) -> Space:
    """The space with the rows that survive a bound."""
    block = int(Recompute.BLOCK)
    if block not in rows.tables.domains["recompute"]:
        return replace(space, rows=rows.compact() if rows.reduce(bound) else None)
    others, partly = rows.only("recompute", lambda v: v != block), rows.only("recompute", lambda v: v == block)
    return replace(
        space,
        rows=others.compact() if others.reduce(bound) else None,
        partly=partly.compact() if partly.reduce(bound) else None,
    )


def _keep_in_reach(rows: Filter, bound: float, sample: int) -> bool:
    """Drop what no assignment within the bound uses, whatever the number of recomputed layers; False: nothing is left.

    ``sample``: what the cheapest so many do not use as well.
    """
    once = rows.copy()
    groups = [group for quantity in (*rows.tables.objective, *rows.tables.limits) for group in quantity.groups]
    for i, table in enumerate(rows.tables.tables):
        alike = all(np.ptp(group.cost) == 0 for group in groups if group.table == i)
        if alike and set(table.axes) == OF_LAYERS:  # any of its rows will do
            once.alive[i][np.flatnonzero(once.alive[i])[1:]] = False
    joined = join(once, bound, sample or REACH_ROWS)
    if joined.table.size and (joined.complete or sample):
        values = {axis: column for axis, column in joined.table.values.items() if axis != "recompute_layers"}
        rows.keep_joined(Table(tuple(values), values))
    return bool(joined.table.size) or not joined.complete


def _with_layers(p: Instance, tables: Tables) -> Tables:
    """Rows of recompute=block where every cut has a number of recomputed layers: with their own counts and leaves."""
    domains = dict(tables.domains)
    splits, of = domain_module.with_recomputation(p.splits, domains["split"], domains["recompute_layers"])
    variants = Table(
        ("split", "recompute_layers", "variant"),
        {"split": of, "recompute_layers": splits.recomputed, "variant": np.arange(len(of))},
    )
    chosen = []
    for table in tables.tables:
        if "split" in table.axes:
            values = Partners(table, variants, domains).join()[2].values
            values["split"] = values.pop("variant")
            axes = ordered(values)
            chosen.append(Table(axes, {axis: values[axis] for axis in axes}))
        elif set(table.axes) != OF_LAYERS:  # those of the cuts imply it
            chosen.append(table)
    domains["split"] = np.arange(len(of))
    q = p.problem.instance(p.gbs, splits)
    found = Tables(q, domains, chosen)
    leaves = Leaves(q, domains, chosen)
    if tables.objective:
        summands = [leaves.quantity(quantity, None, weight) for weight, quantity in objective_tree(q)]
        found.objective = [x for x in summands if any(group.sign > 0 for group in x.groups)]
    found.limits = [leaves.quantity(limit.quantity(q), float(limit.budget(q))) for limit in active_limits(q.problem)]
    return found
