"""What another choice would cost: the best plan with one axis fixed elsewhere, re-solved, and what makes it worse."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from parsolve.config import Config
from parsolve.evaluation import Estimate
from parsolve.optimizer.conflicts import Feasibility
from parsolve.optimizer.ranking import Query, Ranked, Ranking, rank
from parsolve.optimizer.spaces import Spaces
from parsolve.problem import Problem
from parsolve.restrictions import restrict, show_value
from parsolve.result import Counterfactual, Plan

AXES = ("tp", "pp", "cp", "ep", "zero", "recompute", "mbs", "vpp")
MAX_VALUES = 4
EACH_S = 10.0
"""Time limit of one question, s; what is not proven by then is said to be so."""


def counterfactuals(
    problem: Problem, plans: tuple[Plan, ...], answer: Ranking, spaces: Spaces
) -> tuple[Counterfactual, ...]:
    """One answer for the values next to the best plan's on each axis, cheapest first within an axis.

    ``plans``: of the ``answer``. The questions are asked of cuts that can be listed; where the answer has others, a
    plan of its list may be better, and nothing is proven. ``spaces``: those of the problem; each question is a mask.
    """
    feasibility = Feasibility(problem)
    questions = _questions(plans[0].config, answer.domains)
    return tuple(_answer(problem, plans, axis, value, answer, spaces, feasibility) for axis, value in questions)


def _questions(config: Config, domains: dict[str, list[int]]) -> Iterator[tuple[str, int]]:
    for axis in AXES:
        mine = int(getattr(config, axis))
        others = [value for value in domains.get(axis, []) if value != mine]
        order = np.argsort([abs(np.log((value + 1) / (mine + 1))) for value in others], kind="stable")
        for i in sorted(order[:MAX_VALUES].tolist()):
            yield axis, others[i]


def _answer(
    problem: Problem,
    plans: tuple[Plan, ...],
    axis: str,
    value: int,
    answer: Ranking,
    spaces: Spaces,
    feasibility: Feasibility,
) -> Counterfactual:
    best = plans[0]
    change = f"{axis}={show_value(axis, value)}"
    asked = restrict(problem, {axis: show_value(axis, value)})
    ranking = rank(asked, Query(top=1), time_limit=EACH_S, spaces=spaces)
    proven = ranking.complete and ranking.cuts in ("any", answer.cuts)
    listed = [plan for plan in answer.plans if int(getattr(plan.config, axis)) == value]
    found = min((*ranking.plans, *listed), key=partial(_time, problem), default=None)
    if found is None and not ranking.complete:
        return Counterfactual(change, None, None, None, f"no plan found in {EACH_S:.0f} s, none excluded", proven=False)
    if found is None:
        members = [m.name for m in feasibility.conflict(asked)]
        pinned = f"pin {change}"
        against = [name for name in members if name != pinned]
        return Counterfactual(change, None, None, None, f"illegal: excluded by {', '.join(against) or 'the grids'}")
    from parsolve.api import make_plan

    other = make_plan(problem, found.config)
    cost = _cost(problem, other.estimate)
    relative = cost / _cost(problem, best.estimate)
    cause = _cause(best.estimate, other.estimate, best.config.gbs / other.config.gbs)
    return Counterfactual(change, other.config, other.estimate.step_time_s, relative, cause, proven)


def _time(problem: Problem, plan: Ranked) -> float:
    """Step time, or time per sequence where the batch may vary, s."""
    return plan.step_time_s / (plan.config.gbs if problem.per_token else 1)


def _cost(problem: Problem, estimate: Estimate) -> float:
    return estimate.time_per_token_s if problem.per_token else estimate.step_time_s


def _cause(best: Estimate, other: Estimate, scale: float) -> str:
    """The term that grows most, at the best plan's batch size (``scale`` batches of the other)."""
    names = sorted({*best.terms_s, *other.terms_s})
    growth = {name: scale * other.terms_s.get(name, 0.0) - best.terms_s.get(name, 0.0) for name in names}
    worst = max(names, key=lambda name: growth[name])
    if growth[worst] <= 0:
        return "no term grows"
    return f"{worst} grows by {growth[worst]:.4g} s a step"
