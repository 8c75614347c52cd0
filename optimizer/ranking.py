"""The exact ranking of the best plans, and its proof. A plan is a configuration with its best cut of the layers.

1. Rising bound: rows that cannot stay below a guessed bound are dropped, the rest is joined and evaluated in floating
   point, until at least k legal plans lie below the bound (or nothing is left to find).
2. Any cut: where the launcher takes any cut, every configuration that some cut could bring onto the list is found the
   same way with a relaxation of all cuts (optimizer.any_cut), and its best cut is solved for.
3. Proof over the cuts that can be listed: CP-SAT searches for any plan that is not listed and at most as dear as the
   k-th. What it finds is evaluated and listed if it belongs; when it proves that there is none, the list is complete.
A batch that may vary is solved one global batch size after the other with one shared list, ranked per token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from parsolve.config import Config
from parsolve.errors import InternalError
from parsolve.evaluation import (
    active_limits,
    instance_of,
    objective_rows,
    objective_value,
    total_time,
    violations,
)
from parsolve.functions import Array
from parsolve.optimizer import domains as domain_module
from parsolve.optimizer.any_cut import AnyCut
from parsolve.optimizer.bounds import Filter
from parsolve.optimizer.join import Joined, join
from parsolve.optimizer.spaces import Space, Spaces
from parsolve.optimizer.tables import Table
from parsolve.problem import STEP_TIME, Instance, Problem
from parsolve.specs import Recompute

GUESSES = (1.04, 1.12, 1.22, 1.35, 1.5, 1.65, 1.85, 2.2, 3.0, 16.0, math.inf)
"""Bounds tried, as multiples of the root lower bound."""
JOIN_ROWS = 150_000
"""Full assignments evaluated at once."""
FIRST_ROWS = 64
"""Joined rows evaluated at once when a short list is asked for."""
SAMPLE_ROWS = 1_000
"""Partial assignments kept in the first look, whose plans set the bound."""
ANY_CUT_TOP = 20
"""Longer lists take their cuts from those that can be listed (even, first/last counts, embedding and loss counted)."""
MAX_BLOCKED = 3_000
"""Plans that the proof excludes one by one; longer lists are complete by enumeration and proven for rank 1."""
OF_CUT = ("split", "recompute_layers")
"""Axes of which a plan is listed with the best value alone."""
GOAL_OF_OTHERS = "the goal is not the step time alone"
SLACK = 1e-9
"""Relative slack of float comparisons between two evaluations of the same formula."""


@dataclass(frozen=True)
class Ranked:
    """A plan with its ranking key (the objective's value, rounded) and its step time in s."""

    key: float
    config: Config
    step_time_s: float


@dataclass(frozen=True)
class Query:
    """Which plans are asked for.

    ``top``: how many, None for all. ``cap``: only plans whose key is at most this. ``distinct``: the best plan of each
    (tp, pp, cp, ep) only. ``each``: every listed cut and every number of recomputed layers is a plan of its own.
    ``cuts``: ``listed``; ``any``, the best of all cuts of every plan where the launcher takes any cut, of a long list
    those of the first plans; ``auto``, listed, or any where none of these is legal.
    """

    top: int | None = 5
    cap: float = math.inf
    distinct: bool = False
    cuts: str = "auto"
    each: bool = False

    @property
    def short(self) -> bool:
        """A list short enough to solve for the best of all cuts of every plan."""
        return self.top is not None and self.top <= ANY_CUT_TOP


@dataclass
class Ranking:
    """The best plans in order, with what was proven about them.

    ``cuts``: ``listed``, ``any``, or ``first any`` where only the first plans have the best of all cuts.
    """

    plans: list[Ranked] = field(default_factory=list)
    complete: bool = False
    bound: float = 0.0
    search_space: int = 0
    domains: dict[str, list[int]] = field(default_factory=dict)
    proof_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    legal: int | None = None
    cuts: str = "listed"
    open_bound: float = 0.0


def rank_key(value: float) -> float:
    """A cost rounded to 12 significant digits, so that the last bits of a sum do not decide the order."""
    return float(f"{value:.11e}")


def configs_of(p: Instance, table: Table, rows: Iterable[int]) -> list[Config]:
    """Configurations of some rows of a full table."""
    names = ("tp", "pp", "cp", "ep", "etp", "vpp", "zero", "mbs", "grad_acc", "dp", "edp")
    columns = {name: table.values[name] for name in names}
    return [
        Config(
            **{name: int(column[i]) for name, column in columns.items()},
            recompute=Recompute(int(table.values["recompute"][i])),
            recompute_layers=int(table.values["recompute_layers"][i]),
            layers_per_stage=p.splits.cuts[int(table.values["split"][i])].layers,
            mtp_apart=p.splits.cuts[int(table.values["split"][i])].mtp_apart,
            sequence_parallel=bool(p.sequence_parallel and table.values["tp"][i] > 1),
        )
        for i in rows
    ]


def within_limits(p: Instance, table: Table) -> Array:
    """Whether each row holds every limit."""
    legal = np.ones(table.size, dtype=bool)
    for limit in active_limits(p.problem):
        legal &= np.broadcast_to(np.asarray(limit.holds(p, table.values)), (table.size,))
    return legal


def without_cut(config: Config) -> Config:
    """The configuration's choices but for the cut: a plan is listed once, with its best cut.

    The stage of the prediction modules belongs to the cut. Likewise a plan is listed with its best number of recomputed
    layers: recompute=block is recompute=none with more than 0 of them.
    """
    kind = Recompute.NONE if config.recompute == Recompute.BLOCK else config.recompute
    return replace(config, layers_per_stage=(), recompute=kind, recompute_layers=0, mtp_apart=False)


def solves_any_cut(problem: Problem) -> bool:
    """Whether the best of all cuts can be solved for; else the cuts that can be listed are taken."""
    return why_listed(problem) is None


def why_listed(problem: Problem) -> str | None:
    """Why the cuts that can be listed are taken, in words; None: all can be solved for."""
    if not domain_module.takes_any_cut(problem):
        several = any(pp > 1 for pp in domain_module.static_domains(problem)["pp"])
        no_layouts = several and not domain_module.takes_layouts(problem)
        framework = problem.workload.framework
        return (
            f"{framework} takes no layout of the stages" if no_layouts else "no pipeline of several stages is possible"
        )
    if problem.workload.schedule != "1f1b":
        return "the schedule is not 1F1B"
    if any("split" in rule.axes for rule in problem.rules):
        return "a rule over cuts of the layers is given"
    return None if problem.goal == STEP_TIME else GOAL_OF_OTHERS


def layout_of(config: Config) -> tuple[int, int, int, int]:
    """What makes two plans distinct: (tp, pp, cp, ep)."""
    return (config.tp, config.pp, config.cp, config.ep)


class _List:
    """The best plans so far that a query asks for, across batch sizes."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.best: dict[Config | tuple[int, int, int, int], Ranked] = {}

    def name(self, config: Config) -> Config | tuple[int, int, int, int]:
        """What is listed at most once."""
        if self.query.each:
            return config
        return layout_of(config) if self.query.distinct else without_cut(config)

    def key(self, config: Config) -> float:
        """The key of the listed plan with the same name, inf when there is none."""
        known = self.best.get(self.name(config))
        return known.key if known else math.inf

    def add(self, plans: Iterable[Ranked]) -> None:
        """Take what belongs on the list; the smaller (key, config) wins."""
        for plan in plans:
            if plan.key > self.query.cap:
                continue
            name = self.name(plan.config)
            known = self.best.get(name)
            if known is None or (plan.key, plan.config) < (known.key, known.config):
                self.best[name] = plan
        if self.query.top is not None and len(self.best) > self.query.top:
            kept = set(self.sorted()[: self.query.top])
            self.best = {name: plan for name, plan in self.best.items() if plan in kept}

    def sorted(self) -> list[Ranked]:
        """In rank order."""
        return sorted(self.best.values(), key=lambda plan: (plan.key, plan.config))

    @property
    def worst(self) -> float:
        """The key above which nothing is asked for: the k-th, or the cap."""
        if self.query.top is None or len(self.best) < self.query.top:
            return self.query.cap
        return max(plan.key for plan in self.best.values())


class _Clock:
    def __init__(self, limit: float | None) -> None:
        self.start, self.cpu, self.limit = time.perf_counter(), time.process_time(), limit

    def left(self) -> float | None:
        return None if self.limit is None else self.limit - (time.perf_counter() - self.start)

    def over(self) -> bool:
        left = self.left()
        return left is not None and left <= 0


def rank(
    problem: Problem,
    query: Query,
    time_limit: float | None = None,
    progress: Callable[[str], None] | None = None,
    log: bool = False,
    seeds: Iterable[Config] = (),
    spaces: Spaces | None = None,
    workers: int = 1,
) -> Ranking:
    """The best legal plans that the query asks for, in exact order.

    ``seeds`` are plans to start from (the rule of thumb, an earlier result); what is illegal, or outside the stated
    domains, is ignored. ``spaces``: shared tables of a problem that this one narrows.
    ``workers``: threads of CP-SAT; the answer is the same with any number.
    """
    seeds, clock = tuple(seeds), _Clock(time_limit)

    def run(query: Query) -> Ranking:
        return _rank(problem, query, clock, progress, log, seeds, spaces, workers)

    if query.cuts == "listed" or not solves_any_cut(problem):
        return run(replace(query, cuts="listed"))
    if query.cuts == "auto":
        listed = run(replace(query, cuts="listed"))
        if listed.plans or not listed.complete:
            return listed
    if query.short:
        return run(replace(query, cuts="any"))
    head = run(replace(query, top=ANY_CUT_TOP, cuts="any", each=False))
    if head.complete and len(head.plans) < ANY_CUT_TOP:
        return head
    return _joined_lists(query, head, run(replace(query, cuts="listed")))


def _joined_lists(query: Query, head: Ranking, whole: Ranking) -> Ranking:
    """A long list: its first plans over any cut, and the others over cuts that can be listed."""
    best = _List(query)
    best.add([*head.plans, *whole.plans])
    whole.plans = best.sorted()
    whole.complete &= head.complete
    whole.bound = min(head.bound, whole.bound)
    whole.domains = {axis: sorted({*values, *head.domains.get(axis, [])}) for axis, values in whole.domains.items()}
    whole.search_space = max(head.search_space, whole.search_space)
    whole.legal = None
    whole.cuts = "first any"
    return whole


def _rank(
    problem: Problem,
    query: Query,
    clock: _Clock,
    progress: Callable[[str], None] | None,
    log: bool,
    seeds: tuple[Config, ...],
    spaces: Spaces | None,
    workers: int,
) -> Ranking:
    """The same with the query's cuts, listed or any."""
    best, result = _List(query), Ranking()
    search = _Search(problem, best, result, clock, progress or (lambda _: None), log, seeds, spaces, workers)
    batches = domain_module.reachable_batches(problem)
    result.complete = True
    lowest = math.inf
    try:
        for gbs in batches:
            if clock.over():
                result.complete, lowest = False, 0.0
                break
            finished, bound = search.batch(gbs)
            result.complete &= finished
            lowest = min(lowest, bound)
    except KeyboardInterrupt:
        result.complete = False
        lowest = result.open_bound if len(batches) == 1 else 0.0
        _finish(result, best, clock, lowest)
        raise InterruptedRanking(result) from None
    _finish(result, best, clock, lowest)
    return result


class InterruptedRanking(Exception):
    """Raised on ctrl-c with what was found so far."""

    def __init__(self, ranking: Ranking) -> None:
        super().__init__("interrupted")
        self.ranking = ranking


def _finish(result: Ranking, best: _List, clock: _Clock, lowest: float) -> None:
    result.plans = best.sorted()
    first = result.plans[0].key if result.plans else math.inf
    result.bound = first if result.complete else min(first, lowest)
    if best.query.top is None and best.query.cap == math.inf and not best.query.distinct and result.complete:
        result.legal = len(result.plans)
    result.wall_s = time.perf_counter() - clock.start
    result.cpu_s = time.process_time() - clock.cpu


@dataclass
class _Search:
    """One ranking under way."""

    problem: Problem
    best: _List
    result: Ranking
    clock: _Clock
    say: Callable[[str], None]
    log: bool
    seeds: tuple[Config, ...]
    spaces: Spaces | None
    workers: int
    own: Spaces = field(init=False)
    any_cut: bool = field(init=False)

    def __post_init__(self) -> None:
        self.own = Spaces(self.problem)
        self.any_cut = self.best.query.cuts == "any"
        self.result.cuts = self.best.query.cuts

    def batch(self, gbs: int) -> tuple[bool, float]:
        """Improve the list with plans of one batch size; (proven, lower bound of the key)."""
        space = self._space(gbs)
        p, domains = space.p, space.domains
        self.result.domains = _merged(self.result.domains, p, domains)
        self._plant(p, domains)
        self.result.search_space += _combinations(domains)
        bounds = [rows.lower_bound for rows in (space.rows, space.partly) if rows is not None]
        lowest = 0.0 if self.any_cut else min(bounds, default=math.inf)
        self.result.open_bound = lowest
        explored = [] if space.rows is None else [(p, space.rows, self._explore(p, space.rows))]
        partly = self._with_layers(space)
        if partly is not None:
            explored.append((*partly, self._explore(*partly)))
        if self.clock.over():
            return False, lowest
        finished, bound = True, math.inf
        if self.any_cut:
            finished, bound = self._any_cut(gbs)
            explored = [(q, rows, joined) for q, rows, joined in explored if q is not p and not self._complete(joined)]
        for q, rows, joined in explored:
            proven, least = self._prove(q, rows, joined)
            finished, bound = finished and proven, min(bound, least)
        return finished, bound

    def _with_layers(self, space: Space) -> tuple[Instance, Filter] | None:
        """The rows of recompute=block that may belong on the list, with every number of recomputed layers."""
        if space.partly is None or self.clock.over():
            return None
        if self.best.worst == math.inf and self.best.query.top is not None:  # a first look, to have a bound
            some = space.with_layers(sample=SAMPLE_ROWS)
            if some is not None:
                self._enumerate(some[1], some[0], math.inf)
        return space.with_layers(self._limit())

    def _complete(self, joined: Joined | None) -> bool:
        """Whether a join holds everything up to the last key asked for."""
        return joined is not None and joined.complete and joined.limit >= self.best.worst

    def _explore(self, p: Instance, base: Filter) -> Joined | None:
        """List plans of some rows until nothing below the last key is missing; the last join, None without time."""
        joined: Joined | None = None
        if self.best.worst == math.inf and self.best.query.top is not None:
            self._enumerate(base, p, math.inf, max(SAMPLE_ROWS, 4 * self.best.query.top))
        everything = p.splits.with_recomputation and self.best.query.top is None  # others are on the list already
        for guess in (math.inf,) if everything else self._guesses():
            if self.clock.over():
                return None
            limit = min(self._limit(), base.lower_bound * guess)
            joined = self._enumerate(base, p, limit)
            self.say(self._progress(p.gbs, base.lower_bound, joined.table.size))
            if joined.complete and limit >= self._limit():
                break
            if not joined.complete and self.best.worst < math.inf:
                # a sample filled the list: try once more below its last key
                joined = self._enumerate(base, p, self._limit())
                break
        return joined

    def _space(self, gbs: int, any_cut: bool = False) -> Space:
        """The tables of one batch size, with the cuts that can be listed or with all at once."""
        spaces = self.spaces or self.own
        if any_cut:
            spaces = spaces.with_any_cut()
        space = spaces.once if self.spaces is None else spaces.at
        return space(self.problem, gbs, self._limit())

    def _any_cut(self, gbs: int) -> tuple[bool, float]:
        """The same with all cuts at once; (proven, lower bound of the key)."""
        space = self._space(gbs, any_cut=True)
        self.result.domains = _merged(self.result.domains, space.p, space.domains)
        self.result.search_space = max(self.result.search_space, _combinations(space.domains))
        if space.rows is None:
            return True, math.inf
        search = AnyCut(space.p, self)
        for guess in self._guesses():
            limit = min(self._limit(), space.rows.lower_bound * guess)
            if not search.settle(space.rows, limit):
                return False, space.rows.lower_bound
            if limit >= self._limit():
                break
        return True, math.inf

    def _guesses(self) -> tuple[float, ...]:
        """The bounds to try: none but the last key when the list is full."""
        return GUESSES if self.best.worst == math.inf else (math.inf,)

    def _limit(self) -> float:
        """The last key asked for, with the float slack."""
        return self.best.worst * (1 + SLACK)

    def _plant(self, p: Instance, domains: dict[str, Array]) -> None:
        """Put the seeds of this batch size on the list."""
        for config in self.seeds:
            inside = all(value in domains[axis] for axis, value in config.axes().items())
            listed = (config.layers_per_stage, 0, config.mtp_apart) in p.splits.index
            if config.gbs == p.gbs and inside and (listed or (self.any_cut and not config.recompute_layers)):
                own = p if config.cut in p.splits.index else instance_of(self.problem, config)
                if not violations(own, config):
                    self.list_plan(own, config, objective_value(own, config))

    def list_rows(self, p: Instance, table: Table) -> None:
        """List the plans of a full table that belong there, from the lowest bound up."""
        table = table.keep(within_limits(p, table))
        rows = objective_rows(p, table.values)
        of_name = [axis for axis in table.axes if self.best.query.each or axis not in OF_CUT]
        names = list(zip(*(table.values[axis].tolist() for axis in of_name), strict=True))
        known: dict[tuple[int, ...], float] = {}
        for i in np.argsort(rows.bound, kind="stable").tolist():
            if rows.bound[i] > self._limit() * (1 + SLACK):
                break
            if rows.bound[i] > known.get(names[i], math.inf):
                continue
            config = configs_of(p, table, [i])[0]
            if rows.bound[i] <= self.best.key(config) * (1 + SLACK):
                self.list_plan(p, config, rows.exact(i))
            known[names[i]] = self.best.key(config) * (1 + SLACK)

    def list_plan(self, p: Instance, config: Config, cost: float) -> None:
        """Put a legal plan where it belongs; ``p`` knows its cut."""
        if cost <= self._limit():
            time_is_cost = p.problem.goal == STEP_TIME and not p.problem.per_token
            step = cost if time_is_cost else total_time(p, config)
            self.best.add([Ranked(rank_key(cost), config, step)])

    def _progress(self, gbs: int, bound: float, found: int) -> str:
        ranked = self.best.sorted()
        if not ranked:
            return f"batch {gbs}: no plan yet, bound {bound:.4g}"
        gap = max(0.0, 1 - bound / ranked[0].key)
        best = f"best {ranked[0].key:.4g} ({ranked[0].step_time_s:.4g} s a step)"
        return f"batch {gbs}: {best}, bound {bound:.4g}, gap {gap:.1%}, {found} plans in reach"

    def _enumerate(self, base: Filter, p: Instance, limit: float, max_rows: int = 0) -> Joined:
        """Join everything up to ``limit``, and evaluate what may belong on the list, the cheapest first."""
        work = base.copy()
        if not work.reduce(limit):
            return Joined(Table((), {}), np.zeros(0), True, limit)
        capped = self.best.query.top is not None or self.best.query.cap < math.inf
        all_rows = (5 if p.splits.with_recomputation else 50) * JOIN_ROWS
        joined = join(work, limit, max_rows or (JOIN_ROWS if capped else all_rows))
        order = np.argsort(joined.cost, kind="stable")
        chunk = JOIN_ROWS if self.best.query.top is None else max(FIRST_ROWS, 4 * self.best.query.top)
        for start in range(0, len(order), chunk):
            if self.clock.over():
                joined.complete = False
                break
            rows = order[start : start + chunk]
            if joined.cost[rows[0]] > self._limit() * (1 + SLACK):
                break
            self.list_rows(p, joined.table.keep(rows))
        return joined

    def _prove(self, p: Instance, base: Filter, joined: Joined | None) -> tuple[bool, float]:
        """Let CP-SAT look for a plan that is not listed and not dearer than the last key asked for.

        A complete join above that bound drops the rows that no assignment below it uses.
        """
        from parsolve.optimizer.model import CpModel

        start = time.perf_counter()
        best, worst = self.best, self.best.worst
        complete = joined if joined is not None and self._complete(joined) else None
        mine = [plan for plan in best.sorted() if plan.config.gbs == p.gbs]
        if worst == math.inf and len(mine) > MAX_BLOCKED:
            worst = mine[0].key
        bound = worst * (1 + 1e-6)
        work = base.copy()
        if complete is not None:
            if not len(complete.cost):
                return True, math.inf
            work.keep_joined(complete.table.keep(complete.cost <= bound))
        if not work.reduce(bound):
            return True, math.inf
        model = CpModel(work.tables, work.alive, bound)
        if best.query.distinct and complete is not None:
            # the complete join found the best of each layout at this batch; what is asked is a layout not listed
            for plan in best.sorted():
                model.block(dict(zip(("tp", "pp", "cp", "ep"), layout_of(plan.config), strict=True)))
        else:
            for plan in mine:
                if plan.key <= worst * (1 + SLACK):
                    for values in _excluded(p, plan.config, complete is not None):
                        model.block(values)
        if complete is not None and not best.query.distinct:  # what the join has evaluated and found dearer
            known = complete.table.keep(complete.cost <= worst * (1 + SLACK))
            some = {axis: column for axis, column in known.values.items() if axis not in OF_CUT}
            names = dict.fromkeys(zip(*(column.tolist() for column in some.values()), strict=True))
            for name in names if len(names) <= MAX_BLOCKED else ():
                model.block(dict(zip(some, name, strict=True)))
        while True:
            if self.clock.over():
                return False, base.lower_bound
            outcome = model.solve(self.clock.left(), self.log, self.workers)
            if outcome.values is None:
                self.result.proof_s += time.perf_counter() - start
                return outcome.finished, math.inf if outcome.finished else base.lower_bound
            table = Table(tuple(outcome.values), {axis: np.array([v]) for axis, v in outcome.values.items()})
            if within_limits(p, table)[0]:
                cost = objective_rows(p, table.values).exact(0)
                if complete is not None and cost < worst * (1 - 1e-7):
                    raise InternalError(f"CP-SAT found a plan that the enumeration missed: {outcome.values}")
                self.list_plan(p, configs_of(p, table, [0])[0], cost)
            model.block(outcome.values)


def _excluded(p: Instance, config: Config, joined: bool) -> Iterator[dict[str, int]]:
    """What is not asked for again once a plan is listed: the plan where it is among the cuts of ``p``.

    ``joined``: a join has found its best cut and number of recomputed layers, so any others of it.
    """
    if not joined:
        cut = p.splits.index.get(config.cut)
        if cut is not None:
            yield {**config.axes(), "split": cut}
        return
    kinds = {Recompute.NONE, Recompute.BLOCK}
    for kind in sorted(kinds) if config.recompute in kinds else (config.recompute,):
        yield {axis: v for axis, v in {**config.axes(), "recompute": int(kind)}.items() if axis not in OF_CUT}


def _combinations(domains: dict[str, Array]) -> int:
    """Values of all axes multiplied, derived ones left out."""
    derived = ("edp", "shards", "dp", "recompute_layers")
    return math.prod(len(values) for axis, values in domains.items() if axis not in derived)


def _merged(known: dict[str, list[int]], p: Instance, domains: dict[str, Array]) -> dict[str, list[int]]:
    """The domains of all batch sizes so far."""
    merged = {a: sorted({*known.get(a, []), *values.tolist()}) for a, values in domains.items() if a != "split"}
    merged["gbs"] = sorted({*known.get("gbs", []), p.gbs})
    return merged
