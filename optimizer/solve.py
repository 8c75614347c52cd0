"""One call from a problem to a result: ranking, proof, the comparison plans, and the reason when nothing is legal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parsolve.api import assumptions, make_plan
from parsolve.config import Config
from parsolve.evaluate import instance_for, total_time
from parsolve.functions import rule
from parsolve.optimizer.baseline import rule_of_thumb
from parsolve.optimizer.ranking import InterruptedRanking, Ranking, rank
from parsolve.problem import Instance, Problem
from parsolve.result import Baseline, Result


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
    best = ranking.plans[0].key if ranking.plans else None
    plans = tuple(make_plan(problem, plan.config, i + 1, best) for i, plan in enumerate(ranking.plans))
    result = Result(
        problem=problem,
        status=status,
        plans=plans,
        assumptions=assumptions(problem),
        bound=ranking.bound if ranking.plans else None,
        domains=ranking.domains,
        solver=figures,
        baseline=_beside("rule-of-thumb", problem, thumb, best) if best is not None else None,
        even_split=_even_split(problem, ranking, best) if best is not None else None,
    )
    if status == "infeasible":
        from dataclasses import replace

        from parsolve.optimizer.conflicts import explain_infeasible

        result = replace(result, infeasible=explain_infeasible(problem))
    return result


def _status(ranking: Ranking) -> str:
    if ranking.complete:
        return "optimal" if ranking.plans else "infeasible"
    return "feasible" if ranking.plans else "unknown"


def _cost(problem: Problem, config: Config) -> tuple[float, float]:
    """(ranking cost, step time in s) of one configuration."""
    p = instance_for(problem, config.layers_per_stage, config.gbs)
    step = float(total_time(p, {**config.axes(), "split": 0}))
    return (step / (config.gbs * problem.workload.seq_len) if problem.per_token else step), step


def _beside(name: str, problem: Problem, config: Config | None, best: float | None) -> Baseline | None:
    if config is None or best is None:
        return None
    cost, step = _cost(problem, config)
    return Baseline(name, config, step, cost / best)


def _even_split(problem: Problem, ranking: Ranking, best: float | None) -> Baseline | None:
    """The best plan whose stages are equal: the answer itself when it is, else a solve with that rule added."""
    for plan in ranking.plans:
        cut = plan.config.layers_per_stage
        if len({n for rank_layers in cut for n in rank_layers}) == 1:
            return _beside("even", problem, plan.config, best)
    again = rank(problem.with_(rules=(*problem.rules, even_cut)), 1, time_limit=10.0)
    return _beside("even", problem, again.plans[0].config, best) if again.plans else None
