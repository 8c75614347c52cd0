"""Tables shared by many questions about one problem: more rules, more limits, another goal.

A conflict, a counterfactual or a Pareto front asks the same model again and again with a few rules more. A rule over
the axes of a table is a mask on its rows, a limit or a goal is a set of columns, so the tables, and the counts of the
cuts, are built once for each batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from parsolve.evaluation import active_limits, active_rules, objective_tree
from parsolve.functions import Array, Limit, Rule
from parsolve.optimizer import domains as domain_module
from parsolve.optimizer.bounds import INFINITE, Filter
from parsolve.optimizer.tables import Counts, Leaves, Merges, Quantity, apply_rule, build_tables
from parsolve.problem import Goal, Instance, Problem
from parsolve.splits import Splits


@dataclass
class Space:
    """What one question looks at: an instance, its domains, and the surviving rows (None: nothing is left)."""

    p: Instance
    domains: dict[str, Array]
    rows: Filter | None

    @property
    def without_values(self) -> bool:
        """Whether some axis has no value left, so that no table is needed."""
        return any(len(values) == 0 for values in self.domains.values())


@dataclass
class _Shared:
    """A space with what later questions added to it."""

    space: Space
    leaves: Leaves
    masks: dict[Rule, tuple[int, Array]] = field(default_factory=dict)
    limits: dict[Limit, Quantity] = field(default_factory=dict)
    goals: dict[Goal, list[Quantity]] = field(default_factory=dict)


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
        p, domains = space.p, space.domains
        _, counts = self.counts.setdefault(id(p.splits), (p.splits, {}))
        rows = Filter(build_tables(p, domains, self.objective, counts, self.room, self.merges))
        return Space(p, domains, rows.compact() if rows.reduce(bound) else None)

    def at(self, problem: Problem, gbs: int, bound: float = INFINITE) -> Space:
        """The space of a problem at one batch size, on shared tables where they have all axes that are needed."""
        if not self._narrows(problem):
            return Spaces(problem, self.objective, any_cut=self.any_cut).once(problem, gbs, bound)
        if gbs not in self.shared:
            asked = self._build(problem, gbs)
            if asked.without_values:
                return asked
            space = self.once(self.problem, gbs)
            done = space.rows is None
            self.shared[gbs] = space if done else _Shared(space, _leaves(space))
        base = self.shared[gbs]
        if isinstance(base, Space):
            return replace(base, p=problem.instance(gbs, base.p.splits))
        if problem is self.problem:
            rows = base.space.rows
            assert rows is not None
            rows = rows.copy()
            return replace(base.space, rows=rows if rows.reduce(bound) else None)
        try:
            rows = self._narrowed(base, problem)
        except KeyError:
            return self.once(problem, gbs, bound)
        p = problem.instance(gbs, base.space.p.splits)
        return Space(p, base.space.domains, rows.compact() if rows.reduce(bound) else None)

    def _narrows(self, problem: Problem) -> bool:
        """Whether the problem differs from this one by its goal and by added rules and limits alone."""
        mine = self.problem
        same = ("cluster", "model", "workload", "profile", "terms")
        return (
            all(getattr(problem, name) is getattr(mine, name) for name in same)
            and set(active_rules(mine)) <= set(active_rules(problem))
            and set(active_limits(mine)) <= set(active_limits(problem))
        )

    def _narrowed(self, base: _Shared, problem: Problem) -> Filter:
        """The shared rows that the problem's own rules allow, with its limits and its goal.

        Raises
        ------
        KeyError: some function's axes are in no table.
        """
        whole = base.space.rows
        assert whole is not None
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


def _leaves(space: Space) -> Leaves:
    assert space.rows is not None
    tables = space.rows.tables
    return Leaves(space.p, tables.domains, tables.tables)
