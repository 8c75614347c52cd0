"""Vectorised enumeration of the same space as the solver's, for an honest comparison in one run.

Every combination that the rules allow is built with numpy and evaluated with the same functions, slice by slice; no
bound, no row is dropped for its cost. Memory limits apply to whole configurations only.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import numpy as np

from parsolve.evaluation import active_limits, active_rules, objective_rows
from parsolve.functions import Array
from parsolve.optimizer.domains import build, with_recomputation
from parsolve.optimizer.ranking import OF_CUT, rank_key
from parsolve.problem import Instance, Problem
from parsolve.specs import Recompute
from parsolve.splits import Splits

SLICE = 100_000


@dataclass
class Enumerated:
    """What the enumeration found: rows looked at, legal plans, the best keys, s used, and whether it finished."""

    rows: int
    legal: int
    best: list[float]
    seconds: float
    finished: bool


def enumerate_space(problem: Problem, top: int, time_limit: float) -> Enumerated:
    """The ``top`` lowest keys by evaluating everything that the rules allow, each plan with its best cut.

    Schedules are simulated for the rows that their bound lets onto the list.
    """
    start = time.perf_counter()
    p, domains = build(problem, problem.gbs_target[0])
    partly, _ = with_recomputation(p.splits, domains["split"], domains["recompute_layers"])
    p = problem.instance(p.gbs, Splits(problem.model.layer_is_moe, [*p.splits.cuts, *partly.cuts]))
    result = Enumerated(0, 0, [], 0.0, True)
    best: dict[tuple[int, ...], float] = {}
    for layout in _layouts(p, domains):
        if time.perf_counter() - start > time_limit:
            result.finished = False
            break
        for values in _slices(p, domains, layout):
            size = len(values["tp"])
            result.rows += size
            legal = np.ones(size, dtype=bool)
            for limit in active_limits(problem):
                legal &= np.broadcast_to(np.asarray(limit.holds(p, values)), (size,))
            result.legal += int(legal.sum())
            rows = objective_rows(p, values)
            order = np.flatnonzero(legal)
            for i in order[np.argsort(rows.bound[order], kind="stable")].tolist():
                worst = sorted(best.values())[top - 1] if len(best) >= top else math.inf
                if rows.bound[i] > worst:
                    break
                chosen = {axis: int(column[i]) for axis, column in values.items() if axis not in OF_CUT}
                if chosen["recompute"] == Recompute.BLOCK:  # none but for some layers: listed with the best number
                    chosen["recompute"] = int(Recompute.NONE)
                name = tuple(chosen.values())
                if rows.bound[i] < best.get(name, math.inf):
                    best[name] = min(best.get(name, math.inf), rows.exact(i))
    result.best = [rank_key(cost) for cost in sorted(best.values())[:top]]
    result.seconds = time.perf_counter() - start
    return result


def _layouts(p: Instance, domains: dict[str, Array]) -> list[tuple[int, ...]]:
    """(tp, cp, pp, dp, ep, etp, edp) on both grids."""
    found: list[tuple[int, ...]] = []
    for tp, cp, pp in itertools.product(*(domains[axis].tolist() for axis in ("tp", "cp", "pp"))):
        if p.world % (tp * cp * pp):
            continue
        for ep, etp in itertools.product(domains["ep"].tolist(), domains["etp"].tolist()):
            if p.world % (ep * etp * pp) == 0:
                found.append((tp, cp, pp, p.world // (tp * cp * pp), ep, etp, p.world // (ep * etp * pp)))
    return found


def _slices(p: Instance, domains: dict[str, Array], layout: tuple[int, ...]) -> list[dict[str, Array]]:
    """All rows of one layout that the rules allow."""
    _, cp, pp, dp, *_ = layout
    mbs = domains["mbs"][p.gbs % (domains["mbs"] * dp) == 0]
    splits = np.flatnonzero(p.splits.pp == pp)
    grid = np.meshgrid(mbs, domains["zero"], domains["recompute"], splits, indexing="ij")
    columns = [axis.ravel() for axis in grid]
    size = len(columns[0])
    names = ("tp", "cp", "pp", "dp", "ep", "etp", "edp", "shards")
    fixed = dict(zip(names, (*layout, dp * cp), strict=True))
    values: dict[str, Array] = {axis: np.full(size, value) for axis, value in fixed.items()}
    values |= dict(zip(("mbs", "zero", "recompute", "split"), columns, strict=True))
    values["grad_acc"] = p.gbs // (values["mbs"] * dp)
    values["vpp"] = p.splits.vpp[values["split"]]
    values["recompute_layers"] = p.splits.recomputed[values["split"]]
    for rule in active_rules(p.problem):
        keep = np.broadcast_to(np.asarray(rule(p, values), dtype=bool), (len(values["tp"]),))
        if not keep.all():
            values = {axis: column[keep] for axis, column in values.items()}
        if not len(values["tp"]):
            return []
    return [
        {axis: column[i : i + SLICE] for axis, column in values.items()} for i in range(0, len(values["tp"]), SLICE)
    ]
