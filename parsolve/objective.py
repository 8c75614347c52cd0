"""What is minimised, as a user says it: one objective, a lexicographic pair, or a weighted pair."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parsolve.errors import SpecError, UnknownNameError
from parsolve.problem import Goal, Problem
from parsolve.units import parse_fraction

NAMES = ("step_time", "throughput", "cost", "memory")
_MEASURES = {"step_time": "step_time", "throughput": "step_time", "cost": "step_time", "memory": "memory"}


@dataclass(frozen=True)
class Objective:
    """``name`` as given; ``first`` and ``second`` with weights, or ``tolerance`` for a lexicographic pair.

    ``throughput`` (tokens/s per GPU) and ``cost`` (per token, from price_per_gpu_hour) order plans like step time.
    """

    name: str
    first: str
    second: str | None = None
    weights: tuple[float, float] | None = None
    tolerance: float = 0.0

    @property
    def goal(self) -> Goal:
        """What the solver minimises first."""
        return ((1.0, _MEASURES[self.first]),)

    def second_goal(self) -> Goal | None:
        """What decides among the plans within the tolerance of the first."""
        return ((1.0, _MEASURES[self.second]),) if self.second and not self.weights else None


DEFAULT = Objective("step_time", "step_time")


def parse_objective(text: str, problem: Problem) -> Objective:
    """``step_time``, ``memory``, ``throughput``, ``cost``; ``step_time~2%,memory``; ``0.7*step_time+0.3*memory``.

    Raises
    ------
    SpecError: an unknown objective, or cost without a price.
    """
    where = "--objective"
    compact = text.replace(" ", "")
    weighted = re.fullmatch(r"([0-9.]+)\*([a-z_]+)\+([0-9.]+)\*([a-z_]+)", compact)
    if weighted:
        try:
            weights = (float(weighted[1]), float(weighted[3]))
        except ValueError:
            raise SpecError(f"cannot read the weights of {text!r}", where) from None
        found = Objective(compact, _known(weighted[2]), _known(weighted[4]), weights)
        if sum(weights) <= 0 or _MEASURES[found.first] == _MEASURES[_known(weighted[4])]:
            raise SpecError("weigh memory against one of step_time, throughput, cost, with positive weights", where)
    else:
        first, _, second = compact.partition(",")
        name, tilde, tolerance = first.partition("~")
        if tilde and not tolerance:
            raise SpecError("name the tolerance after ~, as in step_time~2%,memory", where)
        slack = parse_fraction(tolerance, where) if tolerance else 0.0
        found = Objective(compact, _known(name), _known(second) if second else None, None, slack)
        if tolerance and not second:
            raise SpecError("a tolerance needs a second objective, as in step_time~2%,memory", where)
    if "cost" in (found.first, found.second) and problem.cluster.price_per_gpu_hour is None:
        raise SpecError("cost needs price_per_gpu_hour in the cluster file", where)
    return found


def _known(name: str) -> str:
    if name not in NAMES:
        raise UnknownNameError("objective", name, NAMES, "--objective")
    return name


def unit(problem: Problem, objective: Objective) -> str:
    """The unit in which the objective's best and bound are given."""
    if objective.weights:
        return "1"
    return {
        "step_time": "s/token" if problem.per_token else "s",
        "throughput": "tokens/s/GPU",
        "cost": "currency/token",
        "memory": "B",
    }[objective.first]


def shown(problem: Problem, objective: Objective, value: float, gbs: int) -> float:
    """The solver's value (s, s/token, bytes) in the objective's unit."""
    if objective.weights or objective.first in ("step_time", "memory"):
        return value
    per_token = value if problem.per_token else value / (gbs * problem.workload.seq_len)
    gpus = problem.cluster.num_gpus
    if objective.first == "throughput":
        return 1.0 / (per_token * gpus) if per_token > 0 else float("inf")
    return per_token * gpus * (problem.cluster.price_per_gpu_hour or 0.0) / 3600.0


__all__ = ["DEFAULT", "NAMES", "Objective", "parse_objective", "shown", "unit"]
