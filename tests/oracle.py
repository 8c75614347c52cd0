"""The judge: every configuration of a small problem, one by one in nested loops, without tables, bounds or OR-Tools.

It shares the rules, terms and domains with the solver, and nothing of how the solver searches.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from parsolve.config import Config
from parsolve.constraints.multi_token import may_be_apart
from parsolve.evaluation import active_limits, active_rules, objective_rows
from parsolve.functions import Array
from parsolve.optimizer.domains import batch_domains, reachable_batches, split_list, static_domains, takes_any_cut
from parsolve.optimizer.ranking import rank_key
from parsolve.problem import Instance, Problem
from parsolve.specs import Recompute
from parsolve.splits import Layers, Split, Splits, bounds, classify

AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "edp", "zero", "mbs", "grad_acc", "recompute", "split")


def enumerate_all(problem: Problem, top: int | None = None, any_cut: bool = False) -> list[tuple[float, Config]]:
    """(ranking key, configuration) of every legal plan with its best cut, or of the ``top`` first, in rank order."""
    found: dict[Config, tuple[float, Config]] = {}
    for gbs in reachable_batches(problem):
        _at_batch(problem, gbs, found, top, any_cut)
    return sorted(found.values())[:top]


@lru_cache(maxsize=1024)
def all_cuts(layers: int, pp: int, vpp: int, mtp_apart: bool = False) -> list[Layers]:
    """Every cut of the stated domain of free cuts."""
    found: dict[Layers, None] = {}
    for side in (False, True):
        ranks = [rank_cuts(layers, pp, vpp, rank, side, mtp_apart) for rank in range(pp)]
        found |= {cut: None for cut in itertools.product(*ranks) if sum(map(sum, cut)) == layers}
    return list(found)


def rank_cuts(
    layers: int, pp: int, vpp: int, rank: int, fuller_first: bool, mtp_apart: bool = False
) -> list[tuple[int, ...]]:
    """The domain of one rank's cuts where all ranks have the fuller chunks first or last, one by one."""
    low, high = (int(b.max()) for b in bounds(layers, pp, vpp))

    def level(total: int, chunks: int) -> list[tuple[int, ...]]:
        small, fuller = divmod(total, chunks)
        if small < low or small + bool(fuller) > high:
            return []
        sizes = (small,) * (chunks - fuller), (small + 1,) * fuller
        return [sizes[1] + sizes[0] if fuller_first else sizes[0] + sizes[1]]

    cuts: dict[tuple[int, ...], None] = {}
    for total in range(layers + 1):
        cuts |= dict.fromkeys(level(total, vpp))
        if pp == 1 or rank not in (0, pp - 1, *([pp - 2] if mtp_apart else [])):
            continue
        for short in range(min(total, high) + 1):
            rest: list[tuple[int, ...]] = [()] if short == total else []
            for others in level(total - short, vpp - 1) if vpp > 1 else rest:
                if short <= max(others, default=high):
                    cuts[(short, *others) if rank == 0 else (*others, short)] = None
    return [cut for cut in cuts if not (mtp_apart and rank == pp - 1 and cut[-1])]


def _splits(problem: Problem, domains: dict[str, tuple[int, ...]], any_cut: bool) -> Splits:
    """All cuts, and those that can be listed with any number of recomputed layers a chunk."""
    listed = split_list(problem, domains["pp"], domains["vpp"]).cuts
    layers, schedule = problem.model.num_layers, problem.workload.schedule
    cuts = dict.fromkeys((cut.layers, False) for cut in listed)
    if any_cut and takes_any_cut(problem):
        shapes = [(p, v) for p in domains["pp"] for v in domains["vpp"] if p > 1 and p * v <= layers + 2]
        cuts |= dict.fromkeys((cut, False) for shape in shapes for cut in all_cuts(layers, *shape))
        if may_be_apart(problem):
            several = [shape for shape in shapes if shape[0] > 2]
            cuts |= dict.fromkeys((cut, True) for shape in several for cut in all_cuts(layers, *shape, mtp_apart=True))
    found = [Split(cut, classify(cut, layers, schedule), mtp_apart=apart) for cut, apart in cuts]
    if Recompute.BLOCK in domains["recompute"]:
        found += [Split(cut.layers, cut.kind, n) for cut in listed for n in range(1, max(map(max, cut.layers)))]
    return Splits(problem.model.layer_is_moe, found, schedule=schedule)


def any_legal(problem: Problem) -> bool:
    """Whether some plan is legal, with any cut that the launcher takes."""
    return any(bool(all_rows(problem, gbs, any_cut=True)[2].any()) for gbs in reachable_batches(problem))


def all_rows(problem: Problem, gbs: int, any_cut: bool = False) -> tuple[Instance, dict[str, Array], Array]:
    """Every combination that fills both grids, as columns, and which of them are legal."""
    domains = {**static_domains(problem), **batch_domains(problem, gbs)}
    splits = _splits(problem, domains, any_cut)
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
    values["recompute_layers"] = splits.recomputed[values["split"]]
    legal = np.ones(len(rows), dtype=bool)
    if rows:
        for rule in active_rules(problem):
            legal &= np.broadcast_to(np.asarray(rule(p, values), dtype=bool), legal.shape)
        for limit in active_limits(problem):
            legal &= np.broadcast_to(np.asarray(limit.holds(p, values), dtype=bool), legal.shape)
    return p, values, legal


def _at_batch(
    problem: Problem, gbs: int, found: dict[Config, tuple[float, Config]], top: int | None, any_cut: bool
) -> None:
    """Put the plans of one batch size in ``found``, by the configuration without its cut and recomputed layers.

    Schedules are simulated for rows whose bound, checked against simulations elsewhere, may still matter.
    """
    p, values, legal = all_rows(problem, gbs, any_cut)
    if not legal.any():
        return
    rows = objective_rows(p, values)
    names = ("tp", "pp", "cp", "ep", "etp", "vpp", "zero", "mbs", "grad_acc", "dp", "edp")
    order = np.flatnonzero(legal)
    worst = math.inf
    for i in order[np.argsort(rows.bound[order], kind="stable")].tolist():
        if rows.bound[i] > worst * (1 + 1e-9):
            break
        config = Config(
            **{name: int(values[name][i]) for name in names},
            recompute=Recompute(int(values["recompute"][i])),
            layers_per_stage=(),
            sequence_parallel=bool(p.sequence_parallel and values["tp"][i] > 1),
        )
        whole = config.recompute if config.recompute != Recompute.BLOCK else Recompute.NONE
        name = replace(config, recompute=whole)  # block is none but for some layers: listed with the best number
        known = found.get(name)
        if known is None or rows.bound[i] <= known[0] * (1 + 1e-9):
            cut = p.splits.cuts[int(values["split"][i])]
            plan = (
                rank_key(rows.exact(i)),
                replace(config, layers_per_stage=cut.layers, recompute_layers=cut.recomputed, mtp_apart=cut.mtp_apart),
            )
            found[name] = min(known, plan) if known else plan
            if top is not None and len(found) >= top:
                worst = sorted(key for key, _ in found.values())[top - 1]
