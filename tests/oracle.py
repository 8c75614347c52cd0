"""The judge: every configuration of a small problem, one by one in nested loops, without tables, bounds or OR-Tools.

It shares the rules, terms and domains with the solver, and nothing of how the solver searches.
"""

from __future__ import annotations

import itertools

import numpy as np

from parsolve.config import Config
from parsolve.evaluation import active_limits, active_rules, objective_value
from parsolve.optimizer.domains import batch_domains, reachable_batches, split_list, static_domains
from parsolve.optimizer.ranking import rank_key
from parsolve.problem import Problem
from parsolve.specs import Recompute

AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "edp", "zero", "mbs", "grad_acc", "recompute", "split")


def enumerate_all(problem: Problem) -> list[tuple[float, Config]]:
    """(ranking key, configuration) of every legal plan, in rank order."""
    found: list[tuple[float, Config]] = []
    for gbs in reachable_batches(problem):
        found += _at_batch(problem, gbs)
    return sorted(found)


def _at_batch(problem: Problem, gbs: int) -> list[tuple[float, Config]]:
    domains = {**static_domains(problem), **batch_domains(problem, gbs)}
    splits = split_list(problem, domains["pp"], domains["vpp"])
    p = problem.instance(gbs, splits)
    world = p.world
    by_pp: dict[int, list[int]] = {}
    for index, cut in enumerate(splits.cuts):
        by_pp.setdefault(cut.pp, []).append(index)
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
                if gbs % (mbs * dp):
                    continue
                for zero, recompute in itertools.product(domains["zero"], domains["recompute"]):
                    for split in by_pp.get(pp, ()):
                        rows.append((tp, cp, pp, dp, ep, etp, edp, zero, mbs, gbs // (mbs * dp), recompute, split))
    if not rows:
        return []
    values = dict(zip(AXES, np.array(rows, dtype=np.int64).T, strict=True))
    values["vpp"] = splits.vpp[values["split"]]
    values["shards"] = values["dp"] * values["cp"]
    legal = np.ones(len(rows), dtype=bool)
    for rule in active_rules(problem):
        legal &= np.broadcast_to(np.asarray(rule(p, values), dtype=bool), legal.shape)
    for limit in active_limits(problem):
        legal &= np.broadcast_to(np.asarray(limit.holds(p, values), dtype=bool), legal.shape)
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
