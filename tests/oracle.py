"""The judge: every configuration of a small problem, one by one in nested loops, without tables, bounds or OR-Tools.

It shares the rules, terms and domains with the solver, and nothing of how the solver searches.
"""

from __future__ import annotations

import itertools

import numpy as np

from parsolve.config import Config
from parsolve.evaluation import active_limits, active_rules, objective_value
from parsolve.functions import Array
from parsolve.optimizer.domains import batch_domains, reachable_batches, split_list, static_domains
from parsolve.optimizer.ranking import rank_key
from parsolve.problem import Instance, Problem
from parsolve.specs import Recompute

AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "edp", "zero", "mbs", "grad_acc", "recompute", "split")


def enumerate_all(problem: Problem) -> list[tuple[float, Config]]:
    """(ranking key, configuration) of every legal plan, in rank order."""
    found: list[tuple[float, Config]] = []
    for gbs in reachable_batches(problem):
        found += _at_batch(problem, gbs)
    return sorted(found)


def any_legal(problem: Problem) -> bool:
    """Whether some plan is legal."""
    return any(bool(_rows(problem, gbs)[2].any()) for gbs in reachable_batches(problem))


def _rows(problem: Problem, gbs: int) -> tuple[Instance, dict[str, Array], Array]:
    """Every combination that fills both grids, as columns, and which of them are legal."""
    domains = {**static_domains(problem), **batch_domains(problem, gbs)}
    splits = split_list(problem, domains["pp"], domains["vpp"])
    p = problem.instance(gbs, splits)
    world = p.world
    by_pp: dict[int, list[int]] = {}
    for index, cut in enumerate(splits.cuts):
        by_pp.setdefault(cut.pp, []).append(index)
    exact = "global_batch" not in problem.without
    rows = []
    for tp, cp, pp in itertools.product(domains["tp"], domains["cp"], domains["pp"]):
        if world % (tp * cp * pp):
            continue
        dp = world // (tp * cp * pp)
        for ep, etp in itertools.product(domains["ep"], domains["etp"]):
            if world % (ep * etp * pp):
                continue
            edp = world // (ep * etp * pp)
            for mbs in domains["mbs"]:
                if exact and gbs % (mbs * dp):
                    continue
                for grad_acc in (gbs // (mbs * dp),) if exact else domains["grad_acc"]:
                    for zero, recompute in itertools.product(domains["zero"], domains["recompute"]):
                        for split in by_pp.get(pp, ()):
                            rows.append((tp, cp, pp, dp, ep, etp, edp, zero, mbs, grad_acc, recompute, split))
    values = dict(zip(AXES, np.array(rows, dtype=np.int64).reshape(-1, len(AXES)).T, strict=True))
    values["vpp"] = splits.vpp[values["split"]]
    values["shards"] = values["dp"] * values["cp"]
    legal = np.ones(len(rows), dtype=bool)
    if rows:
        for rule in active_rules(problem):
            legal &= np.broadcast_to(np.asarray(rule(p, values), dtype=bool), legal.shape)
        for limit in active_limits(problem):
            legal &= np.broadcast_to(np.asarray(limit.holds(p, values), dtype=bool), legal.shape)
    return p, values, legal


def _at_batch(problem: Problem, gbs: int) -> list[tuple[float, Config]]:
    p, values, legal = _rows(problem, gbs)
    if not legal.any():
        return []
    splits = p.splits
    costs = np.broadcast_to(np.asarray(objective_value(p, values)), legal.shape)
    names = ("tp", "pp", "cp", "ep", "etp", "vpp", "zero", "mbs", "grad_acc", "dp", "edp")
    return [
        (
            rank_key(float(costs[i])),
            Config(
                **{name: int(values[name][i]) for name in names},
                recompute=Recompute(int(values["recompute"][i])),
                layers_per_stage=splits.cuts[int(values["split"][i])].layers,
                sequence_parallel=bool(p.sequence_parallel and values["tp"][i] > 1),
            ),
        )
        for i in np.flatnonzero(legal)
    ]
