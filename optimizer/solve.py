"""One call from a problem to a result: ranking, proof, the comparison plans, and the reason when nothing is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parsolve.api import assumptions, make_plan
from parsolve.config import Config
from parsolve.evaluation import instance_for, total_time
from parsolve.functions import rule
from parsolve.optimizer.baseline import rule_of_thumb
from parsolve.optimizer.ranking import InterruptedRanking, Ranked, Ranking, rank
from parsolve.problem import Instance, Problem
from parsolve.result import Baseline, Plan, Result
from parsolve.splits import Layers


@rule("only even cuts", name="even cut only")
def even_cut(p: Instance, *, split: Any) -> Any:
    """Every chunk holds the same number of layers."""
    return p.splits.even[split]


def solve_problem(
    problem: Problem,
    top: int | None = 5,
    time_limit: float | None = None,
    progress: Callable[[str], None] | None = None,
    log: bool = False,
) -> Result:
    """Rank, prove, explain. See ``parsolve.solve``."""
    thumb = rule_of_thumb(problem)
    interrupted = False
    try:
        ranking = rank(problem, top, time_limit, progress, log, seeds=[thumb] if thumb else [])
    except InterruptedRanking as stop:
        ranking, interrupted = stop.ranking, True
    status = _status(ranking)
    figures: dict[str, Any] = {
        "wall_s": ranking.wall_s,
        "cpu_s": ranking.cpu_s,
        "search_space": ranking.search_space,
        "legal": ranking.legal,
    }
    if interrupted:
        figures["interrupted"] = True
    plans = _plans(problem, ranking)
    best = ranking.plans[0] if ranking.plans else None
    left = None if time_limit is None else time_limit - ranking.wall_s
    result = Result(
        problem=problem,
        status=status,
        plans=plans,
        assumptions=assumptions(problem),
        bound=ranking.bound if ranking.plans else None,
        domains=ranking.domains,
        solver=figures,
        baseline=_beside("rule-of-thumb", problem, thumb, best) if best is not None else None,
        even_split=None if best is None or interrupted else _even_split(problem, ranking, best, left),
    )
    if status == "infeasible":
        from parsolve.optimizer.conflicts import explain_infeasible

        result = replace(result, infeasible=explain_infeasible(problem))
    return result


def _status(ranking: Ranking) -> str:
    if ranking.complete:
        return "optimal" if ranking.plans else "infeasible"
    return "feasible" if ranking.plans else "unknown"


def _plans(problem: Problem, ranking: Ranking) -> tuple[Plan, ...]:
    """The ranked configurations with their estimates; instances are shared between plans with the same cut."""
    instances: dict[tuple[Layers, int], Instance] = {}
    plans: list[Plan] = []
    best: float | None = None
    for position, ranked in enumerate(ranking.plans, 1):
        config = ranked.config
        key = (config.layers_per_stage, config.gbs)
        if key not in instances:
            instances[key] = instance_for(problem, *key)
        plan = make_plan(problem, config, position, best, instances[key])
        if best is None:
            best = plan.estimate.time_per_token_s if problem.per_token else plan.estimate.step_time_s
        plans.append(plan)
    return tuple(plans)


def _beside(name: str, problem: Problem, config: Config | None, best: Ranked) -> Baseline | None:
    """A comparison plan and how many times slower than the best it is."""
    if config is None:
        return None
    p = instance_for(problem, config.layers_per_stage, config.gbs)
    step = float(total_time(p, {**config.axes(), "split": 0}))
    relative = step / best.step_time_s
    if problem.per_token:
        relative *= best.config.gbs / config.gbs
    return Baseline(name, config, step, 1.0 if config == best.config else relative)


def _even_split(problem: Problem, ranking: Ranking, best: Ranked, time_limit: float | None) -> Baseline | None:
    """The best plan whose stages are equal: one of the ranking if it holds one, else a solve with that rule added."""
    for plan in ranking.plans:
        if len({n for stage in plan.config.layers_per_stage for n in stage}) == 1:
            return _beside("even", problem, plan.config, best)
    if time_limit is not None and time_limit <= 0:
        return None
    again = rank(problem.with_(rules=(*problem.rules, even_cut)), 1, time_limit)
    return _beside("even", problem, again.plans[0].config, best) if again.plans else None
