"""The Python API: ``solve``, ``check``, ``evaluate``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from parsolve.config import Config
from parsolve.errors import SpecError
from parsolve.evaluation import Estimate, Violation, estimate, instance_of, placement, violations, warnings_for
from parsolve.functions import Limit, Rule, Term
from parsolve.problem import Instance, Problem
from parsolve.reading import parse_config
from parsolve.restrictions import restrict
from parsolve.result import Plan, Result

ConfigLike = Config | str | Path | Mapping[str, Any]


def make_plan(
    problem: Problem, config: Config, rank: int = 1, relative: float = 1.0, p: Instance | None = None
) -> Plan:
    """A configuration with its estimate, placement and warnings.

    ``p`` is an instance that knows the configuration's cut at its batch size, when the caller has one.
    """
    p = p or instance_of(problem, config)
    figures = estimate(_as_run(p, config), config)
    return Plan(
        problem=problem,
        rank=rank,
        config=config,
        estimate=figures,
        placement=placement(p, config),
        relative=relative,
        warnings=tuple(warnings_for(p, config)),
    )


def _as_configured(p: Instance, config: Config) -> Instance:
    """The instance with the configuration's own choice of sequence parallelism."""
    if config.tp > 1 and config.sequence_parallel != p.sequence_parallel:
        from parsolve.problem import replace_workload

        changed = replace_workload(p.problem, sequence_parallel=config.sequence_parallel)
        return changed.instance(p.gbs, p.splits)
    return p


def plan_instance(problem: Problem, config: Config, every_rank: bool = False) -> Instance:
    """The instance that the figures of one configuration come from; see ``Splits`` for ``every_rank``."""
    return _as_run(instance_of(problem, config, every_rank), config)


def _as_run(p: Instance, config: Config) -> Instance:
    """As configured, on as many GPUs as the configuration really names, so that figures of an illegal one agree."""
    p = _as_configured(p, config)
    world = config.tp * config.cp * config.pp * config.dp
    if world == p.world:
        return p
    own = p.problem.instance(p.gbs, p.splits)
    own.world = world
    return own


def evaluate(problem: Problem, config: ConfigLike) -> Estimate:
    """Step time, throughput and memory of one configuration, legal or not.

    Raises
    ------
    SpecError: the configuration cannot be read.
    """
    return make_plan(problem, parse_config(config, problem)[0]).estimate


def check(problem: Problem, config: ConfigLike) -> list[Violation]:
    """Every rule and limit that the configuration breaks; empty when it is legal.

    Raises
    ------
    SpecError: the configuration cannot be read.
    """
    full, cut_known = parse_config(config, problem)
    gbs = full.gbs if problem.per_token else problem.gbs_target[0]
    p = _as_configured(instance_of(problem, full, gbs=gbs), full)
    found = violations(p, full)
    if not cut_known and not any(v.rule == "enough_layers" for v in found):
        layers, chunks = problem.model.num_layers, full.pp * full.vpp
        message = (
            f"{layers} layers do not divide over pp*vpp = {full.pp}*{full.vpp} = {chunks} chunks; choose a divisor, or "
            f"give layers_per_stage (balanced: {full.layers_text(problem.workload.schedule)})"
        )
        found.append(Violation("layers_divide", message, {"layers": layers, "pp": full.pp, "vpp": full.vpp}))
    return found


def check_result(problem: Problem, config: ConfigLike, more: Iterable[Violation] = ()) -> Result:
    """``check`` as a Result with one plan, status legal or illegal; ``more`` are faults found elsewhere."""
    from dataclasses import replace

    found = (*check(problem, config), *more)
    plan = replace(make_plan(problem, parse_config(config, problem)[0]), violations=found)
    return Result(problem, "illegal" if found else "legal", (plan,), assumptions(problem))


def assumptions(problem: Problem) -> tuple[str, ...]:
    """What was taken for granted, one sentence each."""
    cluster, model, profile, workload = problem.cluster, problem.model, problem.profile, problem.workload
    lines = [
        f"efficiency constants of profile {profile.name!r}; `parsolve explain profile` lists them with their origin",
        f"{cluster.gpu.name}: the driver shows {cluster.gpu.memory_bytes / 2**30:.1f} GiB, of which "
        f"{workload.memory_reserve / 2**30:g} GiB are kept in reserve; {profile.outside_bytes / 2**30:g} GiB go to the "
        "CUDA context, NCCL and workspaces",
    ]
    if problem.mtp_layers:
        lines.append(
            f"{problem.mtp_layers} multi-token-prediction module(s) are trained, beside the output layer unless a plan "
            "says mtp_apart; model FLOPs count them"
        )
    elif model.mtp_layers:
        lines.append(f"the {model.mtp_layers} multi-token-prediction module(s) are not trained")
    if workload.schedule != "1f1b" and workload.framework not in ("torchtitan", "generic"):
        lines.append(
            f"{workload.framework} has no {workload.schedule} pipeline: only plans without a pipeline (pp=1) are legal"
        )
    if model.moe:
        lines.append(f"the fullest expert rank gets {profile.expert_imbalance:g} times the mean load")
    lines += model.notes
    return tuple(lines)


def solve(
    problem: Problem,
    *,
    top: int | None = 5,
    pin: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    max: Mapping[str, Any] | None = None,
    min: Mapping[str, Any] | None = None,
    require: Iterable[str] = (),
    rules: Iterable[Rule] = (),
    terms: Iterable[Term] = (),
    limits: Iterable[Limit] = (),
    without: Iterable[str] = (),
    within: float | None = None,
    distinct: bool = False,
    objective: str = "step_time",
    pareto: bool = False,
    explain: bool = False,
    hint: Iterable[Config] = (),
    time_limit: float | None = None,
    workers: int = 1,
    cuts: str = "auto",
    progress: Callable[[str], None] | None = None,
    log: bool = False,
) -> Result:
    """The best legal plans in exact order, with the proof that nothing legal is faster.

    Parameters
    ----------
    top: how many plans; None lists every legal plan.
    pin, forbid, max, min: restrictions per axis, e.g. ``pin={"tp": {4, 8}, "recompute": "none"}``.
    require: conditions over axes, e.g. ``"tp*cp <= 8"``.
    rules, terms, limits, without: the user's own, and built-in ones to leave out by name.
    within: a fraction; lists every plan within it of the best instead of ``top``.
    distinct: only the best plan of each (tp, pp, cp, ep).
    objective: step_time, throughput, cost, memory; a pair ``step_time~2%,memory`` or ``0.7*step_time+0.3*memory``.
    pareto: the front of step time against memory instead of a ranking.
    explain: add counterfactuals: what other choices would cost, re-solved.
    hint: configurations to start from.
    time_limit: s; when it runs out the best plans so far are returned with status ``feasible``.
    workers: threads of CP-SAT; the answer is the same with any number.
    cuts: of the layers into stages. ``listed``: equal chunks, first/last counts, embedding and loss counted as layers;
        ``any``: the best of all that docs/solver.md states for each of up to 20 plans, where the launcher takes layout
        strings; ``auto``: listed, or any where no listed cut is legal.
    progress: called with a line of text now and then.

    Raises
    ------
    SpecError: a restriction cannot be read, no plan, time or worker is asked for, or a user's function raised.
    """
    from parsolve.expressions import require_rule
    from parsolve.objective import parse_objective
    from parsolve.optimizer.solve import Request, solve_problem

    own = (*rules, *(require_rule(text) for text in require))
    if terms or limits or without:
        problem = problem.with_(
            terms=(*problem.terms, *terms),
            limits=(*problem.limits, *limits),
            without=problem.without | frozenset(without),
        )
    problem = restrict(problem, pin, forbid, max, min, own)
    if pareto and (objective != "step_time" or within is not None or distinct):
        raise SpecError("the Pareto front goes with no other objective, within or distinct", "pareto")
    if cuts not in ("auto", "any", "listed"):
        raise SpecError(f"{cuts!r} is none of auto, any, listed", "cuts")
    if top is not None and top < 1:
        raise SpecError(f"at least one plan is to be listed, not {top}", "top")
    if within is not None and not 0 <= within < math.inf:
        raise SpecError(f"{within} is no share above the best: give one like 0.05", "within")
    if time_limit is not None and not time_limit > 0:
        raise SpecError(f"{time_limit} is no time: give seconds above 0, or None", "time_limit")
    if workers < 1:
        raise SpecError(f"at least one worker is needed, not {workers}", "workers")
    request = Request(
        top,
        within,
        distinct,
        parse_objective(objective, problem),
        pareto,
        explain,
        tuple(hint),
        time_limit,
        workers,
        cuts,
    )
    return solve_problem(problem, request, progress, log)


__all__ = ["assumptions", "check", "check_result", "evaluate", "make_plan", "solve"]
