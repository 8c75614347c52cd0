"""One call from a problem to a result: ranking, proof, the comparison plans, and the reason when nothing is legal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parsolve.api import assumptions, make_plan
from parsolve.config import Config
from parsolve.constraints.memory import stage_memory
from parsolve.evaluation import instance_of, objective_value, total_time
from parsolve.functions import Limit, rule
from parsolve.objective import DEFAULT, Objective
from parsolve.optimizer.baseline import rule_of_thumb
from parsolve.optimizer.domains import takes_any_cut
from parsolve.optimizer.ranking import (
    SLACK,
    InterruptedRanking,
    Query,
    Ranked,
    Ranking,
    rank,
    rank_key,
    without_cut,
)
from parsolve.optimizer.spaces import Spaces
from parsolve.problem import Instance, Problem
from parsolve.result import Baseline, Plan, Result
from parsolve.splits import Layers, classify

EQUALLY_FAST = 8
"""Plans asked for at each step of the front, to see whether some are exactly as fast as the first."""
PARETO_STEP = 0.02
"""Neighbours on the front differ by at least this share of memory."""


@rule("only even cuts", name="even cut only")
def even_cut(p: Instance, *, split: Any) -> Any:
    """Every chunk holds the same number of layers."""
    return p.splits.even[split]


@dataclass(frozen=True)
class Request:
    """What is asked of a problem. See ``parsolve.solve``."""

    top: int | None = 5
    within: float | None = None
    distinct: bool = False
    objective: Objective = DEFAULT
    pareto: bool = False
    explain: bool = False
    hints: tuple[Config, ...] = ()
    time_limit: float | None = None
    workers: int = 1
    cuts: str = "auto"


def solve_problem(
    problem: Problem,
    request: Request = Request(),
    progress: Callable[[str], None] | None = None,
    log: bool = False,
) -> Result:
    """Rank, prove, explain."""
    thumb = rule_of_thumb(problem)
    seeds = [*request.hints, *([thumb] if thumb else [])]
    interrupted = False
    spaces = Spaces(problem)
    try:
        ranking = _ranking(problem, request, progress, log, seeds, spaces)
    except InterruptedRanking as stop:
        ranking, interrupted = stop.ranking, True
    status = _status(ranking)
    goal = request.objective
    with_memory = goal.first == "memory" or bool(goal.weights and goal.second == "memory")
    figures: dict[str, Any] = {
        "wall_s": ranking.wall_s,
        "cpu_s": ranking.cpu_s,
        "search_space": ranking.search_space,
        "legal": ranking.legal,
        "cuts": ranking.cuts,
        "all_cuts": ranking.cuts == "any" or with_memory or not takes_any_cut(problem),
    }
    if interrupted:
        figures["interrupted"] = True
    plans = _plans(problem, ranking)
    best = ranking.plans[0] if ranking.plans else None
    left = None if request.time_limit is None else request.time_limit - ranking.wall_s
    even: Baseline | None = None
    if best is not None and not interrupted:
        even, proven = _even_split(problem, ranking, best, left, spaces)
        figures["even_split_proven"] = proven
    result = Result(
        problem=problem,
        status=status,
        plans=plans,
        assumptions=assumptions(problem),
        best_value=_value(problem, request.objective, plans[0], best) if best else None,
        bound=ranking.bound if best else None,
        domains=ranking.domains,
        solver=figures,
        baseline=_beside("rule-of-thumb", problem, thumb, best) if best is not None else None,
        even_split=even,
        objective=request.objective,
        pareto=request.pareto,
    )
    if status == "infeasible":
        from parsolve.optimizer.conflicts import explain_infeasible, only_cuts

        if ranking.complete and ranking.cuts != "any" and takes_any_cut(problem):
            reason = only_cuts(problem, left, with_memory)
            if reason is not None:
                return replace(result, infeasible=reason)
        return replace(result, infeasible=explain_infeasible(problem, left))
    if request.explain and plans and not interrupted:
        from parsolve.optimizer.counterfactuals import counterfactuals

        return replace(result, counterfactuals=counterfactuals(problem, plans, ranking, spaces))
    return result


def _ranking(
    problem: Problem,
    request: Request,
    progress: Callable[[str], None] | None,
    log: bool,
    seeds: list[Config],
    spaces: Spaces,
) -> Ranking:
    """The plans that the request asks for, in its order."""

    start = time.perf_counter()
    cuts = request.cuts

    def run(asked: Problem, query: Query) -> Ranking:
        """All questions of one request are asked of the same cuts."""
        nonlocal cuts
        left = None if request.time_limit is None else request.time_limit - (time.perf_counter() - start)
        ranking = rank(asked, replace(query, cuts=cuts), left, progress, log, seeds, spaces, request.workers)
        if cuts == "auto":
            cuts = "listed" if ranking.cuts == "listed" else "any"
        return ranking

    objective = request.objective
    if request.pareto:
        return pareto_front(problem, run)
    problem = _weighted(problem, objective, run) if objective.weights else problem.with_(goal=objective.goal)
    tolerance = request.within if request.within is not None else objective.tolerance
    second = objective.second_goal()
    if request.within is None and second is None:
        return run(problem, Query(request.top, distinct=request.distinct))
    first = run(problem, Query(1))
    if not first.plans or not first.complete:
        return first
    cap = first.plans[0].key * (1 + tolerance) * (1 + SLACK)
    if second is None:
        return run(problem, Query(request.top if request.within is None else None, cap, request.distinct))
    everything = run(problem, Query(None, cap, each=True))
    inorder = _reordered(problem.with_(goal=second), everything.plans)
    first_of = {without_cut(plan.config): plan for plan in reversed(inorder)}  # by the second goal its best cut
    everything.plans = [plan for plan in inorder if first_of[without_cut(plan.config)] is plan][: request.top]
    return everything


def _value(problem: Problem, objective: Objective, plan: Plan, ranked: Ranked) -> float:
    """The best plan's objective as its estimate has it (the ranking key is rounded)."""
    if objective.weights:
        return ranked.key
    if objective.first == "memory":
        return float(plan.estimate.memory_bytes["total"])
    return plan.estimate.time_per_token_s if problem.per_token else plan.estimate.step_time_s


def _reordered(problem: Problem, plans: list[Ranked]) -> list[Ranked]:
    """The plans sorted by another goal, ties by their order so far. Keys stay those of the first goal."""

    def value(plan: Ranked) -> float:
        p = instance_of(problem, plan.config)
        return rank_key(objective_value(p, plan.config))

    return sorted(plans, key=value)


def _weighted(problem: Problem, objective: Objective, run: Callable[[Problem, Query], Ranking]) -> Problem:
    """The goal w1*first/best first + w2*second/best second, without unit."""
    goal: list[tuple[float, str]] = []
    for weight, name in zip(objective.weights or (), (objective.first, objective.second), strict=True):
        measure = "memory" if name == "memory" else "step_time"
        best = run(problem.with_(goal=((1.0, measure),)), Query(1)).plans
        goal.append((weight / best[0].key if best else weight, measure))
    return problem.with_(goal=tuple(goal))


def pareto_front(problem: Problem, run: Callable[[Problem, Query], Ranking]) -> Ranking:
    """Plans that no other plan beats in both step time and memory of its worst stage, fastest first.

    Each next plan is the fastest that needs at least PARETO_STEP less memory than the one before it, and of equally
    fast ones the leanest; the last is the fastest of the leanest step.
    """
    front: list[Ranked] = []
    budget = math.inf
    total: Ranking | None = None
    while True:
        own = Limit("memory below the last plan", stage_memory, partial(_constant, budget), "")
        asked = problem if budget == math.inf else problem.with_(limits=(*problem.limits, own))
        step = run(asked, Query(EQUALLY_FAST))
        total = step if total is None else _added(total, step)
        if not step.plans or not step.complete:
            break
        plan = _leanest(asked, run, step.plans)
        p = instance_of(problem, plan.config)
        front.append(plan)
        budget = float(stage_memory(p).value(p, {**plan.config.axes(), "split": 0})) * (1 - PARETO_STEP)
    total.plans = front
    return total


def _constant(value: float, p: Instance) -> float:
    return value


def _leanest(problem: Problem, run: Callable[[Problem, Query], Ranking], plans: list[Ranked]) -> Ranked:
    """Among the plans that are exactly as fast as the best of the ``plans``, the one with the least memory."""
    fastest = plans[0].key
    if len(plans) == EQUALLY_FAST and plans[-1].key == fastest:
        plans = run(problem, Query(None, fastest * (1 + SLACK))).plans
    equal = [plan for plan in plans if plan.key == fastest]
    return _reordered(problem.with_(goal=((1.0, "memory"),)), equal)[0]


def _added(total: Ranking, step: Ranking) -> Ranking:
    total.wall_s += step.wall_s
    total.cpu_s += step.cpu_s
    total.complete &= step.complete
    return total


def _status(ranking: Ranking) -> str:
    if ranking.complete:
        return "optimal" if ranking.plans else "infeasible"
    return "feasible" if ranking.plans else "unknown"


def _plans(problem: Problem, ranking: Ranking) -> tuple[Plan, ...]:
    """The ranked configurations with their estimates; ``relative`` is against the least value of the (first) objective.

    Instances are shared between plans with the same cut.
    """
    instances: dict[tuple[tuple[Layers, int, bool], int], Instance] = {}
    plans: list[Plan] = []
    least = min((ranked.key for ranked in ranking.plans), default=1.0)
    for position, ranked in enumerate(ranking.plans, 1):
        config = ranked.config
        key = (config.cut, config.gbs)
        if key not in instances:
            instances[key] = instance_of(problem, config)
        plans.append(make_plan(problem, config, position, ranked.key / least, instances[key]))
    return tuple(plans)


def _beside(name: str, problem: Problem, config: Config | None, best: Ranked) -> Baseline | None:
    """A comparison plan and how many times slower than the best it is."""
    if config is None:
        return None
    p = instance_of(problem, config)
    step = total_time(p, config)
    relative = step / best.step_time_s
    if problem.per_token:
        relative *= best.config.gbs / config.gbs
    return Baseline(name, config, step, 1.0 if config == best.config else relative)


def _even_split(
    problem: Problem, ranking: Ranking, best: Ranked, time_limit: float | None, spaces: Spaces
) -> tuple[Baseline | None, bool]:
    """The best plan whose stages are equal: the best of all, else a solve with that rule added; and whether proven."""
    if classify(best.config.layers_per_stage, problem.model.num_layers, problem.workload.schedule) == "even":
        return _beside("even", problem, best.config, best), ranking.complete
    if time_limit is not None and time_limit <= 0:
        return None, False
    asked = problem.with_(rules=(*problem.rules, even_cut))
    again = rank(asked, Query(1, cuts="listed"), time_limit, spaces=spaces)
    return _beside("even", problem, again.plans[0].config, best) if again.plans else None, again.complete
