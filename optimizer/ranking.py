"""The exact ranking of the best plans, and its proof.

1. Rising bound: rows that cannot stay below a guessed bound are dropped, the rest is joined and evaluated in floating
   point, until at least k legal plans lie below the bound (or nothing is left to find).
2. Proof: CP-SAT searches for any plan that is not listed and at most as dear as the k-th. What it finds is evaluated
   and listed if it belongs; when it proves that there is none, the ranking is complete.
A batch that may vary is solved one global batch size after the other with one shared list, ranked per token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from parsolve.config import Config
from parsolve.errors import InternalError
from parsolve.evaluation import active_limits, instance_for, total_time, violations
from parsolve.functions import Array
from parsolve.optimizer import domains as domain_module
from parsolve.optimizer.bounds import Filter
from parsolve.optimizer.join import Joined, join
from parsolve.optimizer.tables import Table, build_tables
from parsolve.problem import Instance, Problem
from parsolve.specs import Recompute

GUESSES = (1.03, 1.08, 1.15, 1.25, 1.35, 1.5, 1.7, 2.0, 2.5, 4.0, 16.0, math.inf)
"""Bounds tried, as multiples of the root lower bound."""
JOIN_ROWS = 150_000
"""Full assignments evaluated at once."""
MAX_BLOCKED = 3_000
"""Plans that the proof excludes one by one; longer lists are complete by enumeration and proven for rank 1."""
SLACK = 1e-9
"""Relative slack of float comparisons between two evaluations of the same formula."""


@dataclass(frozen=True)
class Ranked:
    """A plan with its step time and its ranking key (step time, or time per token when batches differ)."""

    key: float
    config: Config
    step_time_s: float


@dataclass
class Ranking:
    """The best plans in order, with what was proven about them."""

    plans: list[Ranked] = field(default_factory=list)
    complete: bool = False
    bound: float = 0.0
    search_space: int = 0
    domains: dict[str, list[int]] = field(default_factory=dict)
    batches: int = 0
    proof_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    timed_out: bool = False
    legal: int | None = None
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
            layers_per_stage=p.splits.cuts[int(table.values["split"][i])].layers,
            sequence_parallel=bool(p.sequence_parallel and table.values["tp"][i] > 1),
        )
        for i in rows
    ]


def evaluate_rows(p: Instance, table: Table, times: bool = True) -> tuple[Array, Array]:
    """Step time of each row (0 unless ``times``), and whether it holds every limit."""
    cost = total_time(p, table.values) if times else 0.0
    legal = np.ones(table.size, dtype=bool)
    for limit in active_limits(p.problem):
        legal &= np.broadcast_to(np.asarray(limit.holds(p, table.values)), (table.size,))
    return np.broadcast_to(np.asarray(cost, dtype=float), (table.size,)), legal


class _List:
    """The k best distinct plans so far, across batch sizes."""

    def __init__(self, k: int | None) -> None:
        self.k, self.best = k, dict[Config, Ranked]()

    def add(self, plans: Iterable[Ranked]) -> None:
        for plan in plans:
            self.best[plan.config] = plan
        if self.k is not None and len(self.best) > self.k:
            self.best = {plan.config: plan for plan in self.sorted()[: self.k]}

    def sorted(self) -> list[Ranked]:
        return sorted(self.best.values(), key=lambda plan: (plan.key, plan.config))

    @property
    def worst(self) -> float:
        """The k-th key, infinite while fewer are known."""
        if self.k is None or len(self.best) < self.k:
            return math.inf
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
    top: int | None,
    time_limit: float | None = None,
    progress: Callable[[str], None] | None = None,
    log: bool = False,
    seeds: Iterable[Config] = (),
) -> Ranking:
    """The ``top`` best legal plans (all when None) in exact order.

    ``seeds`` are plans to start from (the rule of thumb); illegal ones are ignored.
    """
    clock, best, result = _Clock(time_limit), _List(top), Ranking()
    say = progress or (lambda _: None)
    for seed in seeds:
        _add_seed(problem, seed, best)
    batches = domain_module.reachable_batches(problem)
    result.batches = len(batches)
    result.complete = True
    lowest = math.inf
    try:
        for gbs in batches:
            if clock.over():
                result.complete, result.timed_out = False, True
                lowest = 0.0
                break
            finished, bound = _rank_batch(problem, gbs, best, result, clock, say, log)
            result.complete &= finished
            lowest = min(lowest, bound)
            if not finished:
                result.timed_out = True
    except KeyboardInterrupt:
        result.complete = False
        result.plans = best.sorted()
        if len(batches) == 1 and result.plans:
            result.bound = min(result.open_bound, result.plans[0].key)
        _stop(result, clock)
        raise InterruptedRanking(result) from None
    result.plans = best.sorted()
    first = result.plans[0].key if result.plans else math.inf
    result.bound = first if result.complete else min(first, lowest)
    if top is None and result.complete:
        result.legal = len(result.plans)
    _stop(result, clock)
    return result


class InterruptedRanking(Exception):
    """Raised on ctrl-c with what was found so far."""

    def __init__(self, ranking: Ranking) -> None:
        super().__init__("interrupted")
        self.ranking = ranking


def _stop(result: Ranking, clock: _Clock) -> None:
    result.wall_s = time.perf_counter() - clock.start
    result.cpu_s = time.process_time() - clock.cpu


def _key_scale(problem: Problem, gbs: int) -> float:
    return 1.0 / (gbs * problem.workload.seq_len) if problem.per_token else 1.0


def _add_seed(problem: Problem, config: Config, best: _List) -> None:
    p = instance_for(problem, config.layers_per_stage, config.gbs)
    low, high = problem.gbs_target
    if violations(p, config) or not (low <= config.gbs <= high):
        return
    step = float(total_time(p, {**config.axes(), "split": 0}))
    best.add([Ranked(rank_key(step * _key_scale(problem, config.gbs)), config, step)])


def _rank_batch(
    problem: Problem,
    gbs: int,
    best: _List,
    result: Ranking,
    clock: _Clock,
    say: Callable[[str], None],
    log: bool,
) -> tuple[bool, float]:
    """Improve the list with plans of one batch size; (proven, lower bound of the key)."""
    p, domains = domain_module.build(problem, gbs)
    result.domains = _merged(result.domains, p, domains)
    if any(len(values) == 0 for values in domains.values()):
        return True, math.inf
    scale = _key_scale(problem, gbs)
    tables = build_tables(p, domains)
    result.search_space += math.prod(len(v) for axis, v in domains.items() if axis not in ("edp", "shards", "dp"))
    base = Filter(tables)
    if not base.reduce(best.worst / scale * (1 + SLACK)):
        return True, math.inf
    result.open_bound = base.lower_bound * scale
    exhausted, joined = False, None
    for guess in GUESSES:
        if clock.over():
            return False, base.lower_bound * scale
        limit = min(best.worst / scale * (1 + SLACK), base.lower_bound * guess)
        found, exhausted, joined = _enumerate(base, p, limit, scale, best)
        say(_progress(gbs, best, base.lower_bound, found))
        if exhausted and limit >= best.worst / scale:
            break
        if exhausted and limit == math.inf:
            break
        if not exhausted and len(best.best) and best.k is not None and best.worst < math.inf:
            # a sample gave k plans: try once more below the k-th
            limit = best.worst / scale * (1 + SLACK)
            _, exhausted, joined = _enumerate(base, p, limit, scale, best)
            break
    return _prove(p, base, scale, best, result, clock, joined if exhausted else None, log)


def _progress(gbs: int, best: _List, bound: float, found: int) -> str:
    ranked = best.sorted()
    if not ranked:
        return f"batch {gbs}: no plan yet, bound {bound:.4g} s"
    step = ranked[0].step_time_s
    gap = max(0.0, 1 - bound / step) if ranked[0].config.gbs == gbs else 0.0
    return f"batch {gbs}: best {step:.4g} s, bound {bound:.4g} s, gap {gap:.1%}, {found} plans in reach"


def _enumerate(base: Filter, p: Instance, limit: float, scale: float, best: _List) -> tuple[int, bool, Joined | None]:
    """Join and evaluate everything below ``limit``; (legal plans found, nothing was cut off, the join)."""
    work = base.copy()
    if not work.reduce(limit):
        return 0, True, None
    rows = JOIN_ROWS if best.k is not None else 50 * JOIN_ROWS
    joined = join(work, limit, rows)
    table = joined.table
    found = 0
    for start in range(0, table.size, JOIN_ROWS):
        part = Table(table.axes, {axis: v[start : start + JOIN_ROWS] for axis, v in table.values.items()})
        times, legal = evaluate_rows(p, part)
        good = np.flatnonzero(legal & (times <= limit))
        found += len(good)
        if best.k is not None and len(good) > 4 * best.k:
            cut = np.partition(times[good], best.k)[best.k]
            good = good[times[good] <= cut * (1 + SLACK)]
        best.add(
            Ranked(rank_key(float(times[i]) * scale), config, float(times[i]))
            for i, config in zip(good, configs_of(p, part, good), strict=True)
        )
    return found, joined.complete, joined


def _prove(
    p: Instance,
    base: Filter,
    scale: float,
    best: _List,
    result: Ranking,
    clock: _Clock,
    joined: Joined | None,
    log: bool,
) -> tuple[bool, float]:
    """Let CP-SAT look for a plan that is not listed and not dearer than the k-th.

    A complete join above that bound drops the rows that no assignment below it uses.
    """
    from parsolve.optimizer.model import CpModel

    start = time.perf_counter()
    worst = best.worst
    mine = [plan for plan in best.sorted() if plan.config.gbs == p.gbs]
    if best.k is None and len(mine) > MAX_BLOCKED:
        worst = mine[0].key
    bound = worst / scale * (1 + 1e-6)
    work = base.copy()
    if joined is not None and joined.limit >= worst / scale:
        work.keep_joined(joined.table.keep(joined.cost <= bound))
    if not work.reduce(bound):
        return True, math.inf
    model = CpModel(work.tables, work.alive, bound)
    for plan in mine:
        if plan.key <= worst * (1 + SLACK):
            model.block(_assignment(p, plan.config))
    while True:
        if clock.over():
            return False, base.lower_bound * scale
        outcome = model.solve(clock.left(), log)
        if outcome.values is None:
            result.proof_s += time.perf_counter() - start
            return outcome.finished, math.inf if outcome.finished else base.lower_bound * scale
        table = Table(tuple(outcome.values), {axis: np.array([v]) for axis, v in outcome.values.items()})
        times, legal = evaluate_rows(p, table)
        key = rank_key(float(times[0]) * scale)
        if legal[0] and key < best.worst:
            if joined is not None and key < worst * (1 - 1e-7):
                raise InternalError(
                    f"CP-SAT found a plan that the enumeration below the bound missed: {outcome.values}"
                )
            best.add([Ranked(key, configs_of(p, table, [0])[0], float(times[0]))])
        model.block(outcome.values)


def _assignment(p: Instance, config: Config) -> dict[str, int]:
    return {**config.axes(), "split": p.splits.index[config.layers_per_stage]}


def _merged(known: dict[str, list[int]], p: Instance, domains: dict[str, Array]) -> dict[str, list[int]]:
    merged = {
        axis: sorted({*known.get(axis, []), *values.tolist()}) for axis, values in domains.items() if axis != "split"
    }
    merged["gbs"] = sorted({*known.get("gbs", []), p.gbs})
    return merged
