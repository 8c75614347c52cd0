"""What ``solve`` and ``check`` return, and its JSON (schema_version 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from parsolve.config import Config
from parsolve.errors import NotExpressibleError, SpecError
from parsolve.evaluation import Estimate, StageMemory, Violation, stage_memories
from parsolve.objective import DEFAULT, Objective, shown, unit
from parsolve.problem import Problem

if TYPE_CHECKING:
    from parsolve.objectives.schedule_length import Timeline

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """One ranked configuration with its estimate. ``relative`` is its cost over the best plan's."""

    problem: Problem
    rank: int
    config: Config
    estimate: Estimate
    placement: dict[str, str]
    relative: float
    warnings: tuple[Violation, ...] = ()
    violations: tuple[Violation, ...] = ()

    @property
    def limited_by(self) -> str:
        """The largest term of the step time."""
        return self.estimate.limited_by

    @cached_property
    def stages(self) -> list[StageMemory]:
        """Memory by part of every pipeline rank, bytes."""
        from parsolve.api import plan_instance

        return stage_memories(plan_instance(self.problem, self.config, every_rank=True), self.config)

    def timeline(self) -> Timeline:
        """When every forward and backward pass of the pipeline starts and ends in one step, s."""
        from parsolve.api import plan_instance
        from parsolve.evaluation import pipeline_timeline

        return pipeline_timeline(plan_instance(self.problem, self.config), self.config)

    def _stages_json(self) -> list[dict[str, Any]]:
        """A row a pipeline rank: its chunks' layer counts and its memory by part, bytes.

        Prediction modules that are trained are named on the rank that has them.
        """
        limit, cut = self.estimate.memory_bytes["limit"], self.config.layers_per_stage
        rows: list[dict[str, Any]] = [
            {
                "rank": stage.rank,
                "layers": list(cut[stage.rank]),
                "recomputed": [min(n, self.config.recompute_layers) for n in cut[stage.rank]],
                "memory_bytes": stage.to_json(limit),
            }
            for stage in self.stages
        ]
        if self.problem.mtp_layers:
            rows[self.config.mtp_rank]["mtp_layers"] = self.problem.mtp_layers
        return rows

    def launch(self, launcher: str) -> Any:
        """The launcher's ``Launch`` for this plan.

        Raises
        ------
        NotExpressibleError: with the reason. UnknownNameError: no such launcher.
        """
        from parsolve.launchers import launch

        return launch(launcher, self.problem, self.config)

    def args(self, launcher: str) -> str:
        """The pasteable launch line."""
        return str(self.launch(launcher).line())

    def to_json(self, launchers: Sequence[str] | None = None) -> dict[str, Any]:
        """One entry of ``plans``."""
        from parsolve.launchers import LAUNCHERS

        args: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for name in launchers if launchers is not None else LAUNCHERS:
            if self.violations:
                args[name], missing[name] = None, "the configuration is illegal"
                continue
            try:
                args[name] = self.launch(name).to_json()
            except NotExpressibleError as error:
                args[name], missing[name] = None, str(error)
        return {
            "rank": self.rank,
            "config": self.config.to_json(),
            "estimate": self.estimate.to_json(),
            "stages": self._stages_json(),
            "placement": self.placement,
            "relative": self.relative,
            "limited_by": self.limited_by,
            "warnings": [{"rule": w.rule, "message": w.message} for w in self.warnings],
            "args": args,
            "not_expressible": missing,
        }


@dataclass(frozen=True)
class Baseline:
    """A plan shown beside the answer: the rule of thumb, or the best even cut."""

    name: str
    config: Config
    step_time_s: float
    relative: float

    def to_json(self) -> dict[str, Any]:
        """``baseline`` or ``even_split`` of the JSON output."""
        return {
            "name": self.name,
            "config": self.config.to_json(),
            "step_time_s": self.step_time_s,
            "relative": self.relative,
        }


@dataclass(frozen=True)
class Counterfactual:
    """The best plan under another choice: ``relative`` to the best plan and what grows, or why it is illegal.

    ``proven``: false when the time ran out, so that there may be a faster one.
    """

    change: str
    config: Config | None
    step_time_s: float | None
    relative: float | None
    cause: str
    proven: bool = True

    def to_json(self) -> dict[str, Any]:
        """One entry of ``counterfactuals``."""
        return {**vars(self), "config": self.config.to_json() if self.config else None}


@dataclass(frozen=True)
class Relaxation:
    """A change that makes an infeasible problem feasible, with the best step time it then has."""

    change: str
    drops: str
    step_time_s: float | None


@dataclass(frozen=True)
class Infeasible:
    """Why nothing is legal: a minimal conflict of named rules, in words, and what would help."""

    conflict: tuple[Violation, ...]
    explanation: str
    relaxations: tuple[Relaxation, ...]

    def to_json(self) -> dict[str, Any]:
        """``infeasible`` of the JSON output."""
        return {
            "conflict": [{"rule": v.rule, "message": v.message} for v in self.conflict],
            "explanation": self.explanation,
            "relaxations": [vars(r) for r in self.relaxations],
        }


@dataclass(frozen=True)
class Result:
    """The answer to a problem. ``status``: optimal, feasible, infeasible, unknown (solve); legal, illegal (check)."""

    problem: Problem
    status: str
    plans: tuple[Plan, ...]
    assumptions: tuple[str, ...] = ()
    best_value: float | None = None
    bound: float | None = None
    domains: dict[str, list[int]] = field(default_factory=dict)
    solver: dict[str, Any] = field(default_factory=dict)
    baseline: Baseline | None = None
    even_split: Baseline | None = None
    infeasible: Infeasible | None = None
    objective: Objective = DEFAULT
    counterfactuals: tuple[Counterfactual, ...] = ()
    pareto: bool = False

    @property
    def best(self) -> Plan:
        """The first plan.

        Raises
        ------
        SpecError: there is none.
        """
        if not self.plans:
            raise SpecError("the result holds no plan", self.status)
        return self.plans[0]

    @property
    def warnings(self) -> tuple[Violation, ...]:
        """Warnings of the best plan."""
        return self.plans[0].warnings if self.plans else ()

    def _objective_json(self) -> dict[str, Any]:
        """Name, unit, best, bound and gap; the gap is that of the minimised value."""
        best, bound = self.best_value, self.bound
        if not self.plans or self.status not in ("optimal", "feasible"):
            best = bound = None
        elif self.status == "optimal":
            bound = best
        gap = None if best is None or bound is None else max(0.0, (best - bound) / best)
        gbs = self.plans[0].config.gbs if self.plans else 1
        show = [None if v is None else shown(self.problem, self.objective, v, gbs) for v in (best, bound)]
        name, in_unit = self.objective.name, unit(self.problem, self.objective)
        return {"name": name, "unit": in_unit, "best": show[0], "bound": show[1], "gap": gap}

    def to_json(self) -> dict[str, Any]:
        """The whole result as plain data, see the JSON contract in the documentation."""
        data: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "parsolve_version": _version(),
            "status": self.status,
            "problem": problem_json(self.problem, self.domains),
            "assumptions": list(self.assumptions),
            "warnings": [{"rule": w.rule, "message": w.message} for w in self.warnings],
            "objective": self._objective_json(),
            "solver": self.solver,
            "baseline": self.baseline.to_json() if self.baseline else None,
            "even_split": self.even_split.to_json() if self.even_split else None,
            "plans": [plan.to_json() for plan in self.plans],
            "infeasible": self.infeasible.to_json() if self.infeasible else None,
        }
        if self.counterfactuals:
            data["counterfactuals"] = [c.to_json() for c in self.counterfactuals]
        if self.pareto:
            data["pareto"] = ["step_time_s", "memory_bytes.total"]
        if self.status in ("legal", "illegal"):
            data["violations"] = [vars(v) for v in self.plans[0].violations] if self.plans else []
        return data


def _version() -> str:
    from parsolve import __version__

    return __version__


def problem_json(problem: Problem, domains: dict[str, list[int]]) -> dict[str, Any]:
    """``problem`` of the JSON output: everything that was read, enough to build the problem again."""
    return {
        "cluster": problem.cluster.model_dump(mode="json"),
        "model": {
            **problem.model.model_dump(mode="json"),
            "num_params": problem.model.num_params,
            "num_active_params": problem.model.num_active_params,
        },
        "workload": problem.workload.model_dump(mode="json"),
        "framework": problem.workload.framework,
        "framework_version": problem.framework_version,
        "profile": problem.profile.name,
        "rules": [rule.name for rule in problem.rules],
        "domains": domains,
    }
