"""The master problem of one configuration's cut where cuts are too many to list: a CP-SAT model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parsolve.evaluation import PIPELINE
from parsolve.functions import Array
from parsolve.objectives.schedule_paths import Path
from parsolve.optimizer.cut_forms import Row, fixed, on_path
from parsolve.problem import Instance
from parsolve.splits import RankCuts

RESOLUTION = 10**8
"""Ticks in the value to beat; coefficients are rounded down, so that the model is a relaxation."""
GAP = 5e-4
"""A round need not find the cheapest cut under the paths so far; that none is left is proven in any case."""


class CutModel:
    """The master problem of one row: a literal for each cut that a rank may have, and the paths met so far.

    Layers of the rarer kind have variables of their own, on the stages that they can reach.
    """

    def __init__(self, p: Instance, row: Row, to_beat: float, domains: Sequence[RankCuts]) -> None:
        from ortools.sat.python import cp_model

        self.cp, self.row, self.shape = cp_model, row, row.shape
        self.model = cp_model.CpModel()
        self.tick = to_beat / RESOLUTION
        self._options(p.model.num_layers, domains)
        self._rarer_kind(p.model.layer_is_moe)
        self.values: list[Any] = []
        self.pipeline: Any = None
        constant = 0.0
        for form, units in row.objective:
            if form.name != PIPELINE and not any(
                units[name] for name in ("dense", "moe", "first", "last", "before_last")
            ):
                value = form.weight * units["nothing"]
                constant += max(0.0, value) if form.at_least_zero else value
                continue
            variable = self.model.new_int_var(0 if form.at_least_zero else -RESOLUTION, RESOLUTION, form.name)
            self.values.append(variable)
            if form.name == PIPELINE:
                self.pipeline, self.weight = variable, form.weight
            else:
                for rank in range(self.shape.pp):
                    self.model.add(variable >= self._on_rank(units, rank, form.weight / self.tick))
        self.constant = math.floor(constant / self.tick)
        if self.values:
            self.improve(to_beat)
            self.model.minimize(cp_model.LinearExpr.sum(self.values))

    def _options(self, layers: int, domains: Sequence[RankCuts]) -> None:
        """A literal for each cut of the stated domain that a rank may have."""
        fuller_first = self.model.new_bool_var("")
        self.sizes = [cuts.sizes for cuts in domains]
        self.chosen: list[list[Any]] = []
        self.last: list[int] = []
        for cuts in domains:
            literals = [self.model.new_bool_var("") for _ in cuts.total]
            for i in np.flatnonzero(~cuts.fuller_last).tolist():
                self.model.add_implication(literals[i], fuller_first)
            for i in np.flatnonzero(~cuts.fuller_first).tolist():
                self.model.add_implication(literals[i], fuller_first.negated())
            self.model.add_exactly_one(literals)
            self.chosen.append(literals)
        everything = [literal for literals in self.chosen for literal in literals]
        totals = np.concatenate([cuts.total for cuts in domains])
        self.model.add(self.cp.LinearExpr.weighted_sum(everything, totals.tolist()) == layers)

    def _stage(self, stage: int) -> Any:
        """Layers of one stage, a linear expression."""
        rank, chunk = stage % self.shape.pp, stage // self.shape.pp
        return self.cp.LinearExpr.weighted_sum(self.chosen[rank], self.sizes[rank][:, chunk].tolist())

    def _rarer_kind(self, is_moe: Sequence[bool]) -> None:
        """``rare[stage]``: layers of the kind with fewer layers, a variable where there can be any."""
        moe = sum(is_moe)
        self.common_is_moe = 2 * moe >= len(is_moe)
        self.rare: dict[int, Any] = {}
        if moe in (0, len(is_moe)):
            return
        prefix = np.concatenate(([0], np.cumsum([kind != self.common_is_moe for kind in is_moe]))).tolist()
        last = max(i for i, n in enumerate(prefix) if n < prefix[-1])
        before: Any = 0
        end: Any = 0
        least_before = 0
        for stage in range(self.shape.pp * self.shape.vpp):
            if least_before > last:
                break
            total = self.model.new_int_var(0, len(is_moe), "")
            self.model.add(total == end + self._stage(stage))
            so_far = self.model.new_int_var(0, int(prefix[-1]), "")
            self.model.add_element(total, prefix, so_far)
            self.rare[stage] = self.model.new_int_var(0, int(prefix[-1]), "")
            self.model.add(self.rare[stage] == so_far - before)
            end, before = total, so_far
            least_before += int(self.sizes[stage % self.shape.pp][:, stage // self.shape.pp].min())

    def _kinds(self, units: Mapping[str, float]) -> tuple[float, float]:
        """The coefficient of the common kind, and by how much the rarer one's is larger."""
        common, rare = ("moe", "dense") if self.common_is_moe else ("dense", "moe")
        return units[common], (units[rare] - units[common] if self.rare else 0.0)

    def _sum(self, rank: int, of_options: Array, more: float, scale: float) -> Any:
        """Ticks, rounded down: a value for each option of a rank, and ``more`` for each layer of the rarer kind."""
        total = self.cp.LinearExpr.weighted_sum(
            self.chosen[rank], np.floor(of_options * scale).astype(np.int64).tolist()
        )
        own = [self.rare[stage] for stage in self.rare if stage % self.shape.pp == rank]
        return total + math.floor(more * scale) * self.cp.LinearExpr.sum(own) if own and more else total

    def _on_rank(self, units: Mapping[str, float], rank: int, scale: float) -> Any:
        """A form on one rank."""
        each, more = self._kinds(units)
        outside = fixed(units, self.shape.pp, self.shape.microbatches)[rank]
        return self._sum(rank, outside + each * self.sizes[rank].sum(axis=1), more, scale)

    def add_paths(self, paths: Path) -> None:
        """The schedule is at least as long as each of these stacked paths."""
        if self.pipeline is None:
            return
        scale, pp = self.weight / self.tick, self.shape.pp
        for outside, dense, moe in zip(*on_path(paths, self.row.items), strict=True):
            each, more = (moe, dense - moe) if self.common_is_moe else (dense, moe - dense)
            terms = [math.floor(outside * scale)]
            for rank in range(pp):
                terms.append(self._sum(rank, self.sizes[rank] @ each[rank::pp], 0.0, scale))
            terms += [math.floor(float(more[stage]) * scale) * count for stage, count in self.rare.items()]
            self.model.add(self.pipeline >= self.cp.LinearExpr.sum(terms))

    def forbid(self) -> None:
        """Not the last cut again."""
        self.model.add_bool_or([self.chosen[rank][i].negated() for rank, i in enumerate(self.last)])

    def improve(self, cost: float) -> None:
        """Only cuts that beat ``cost``."""
        room = math.floor(cost / self.tick) - self.constant
        self.model.add(self.cp.LinearExpr.sum(self.values) <= room)

    def solve(self, time_limit: float | None) -> tuple[Array, bool]:
        """A cut that is about the cheapest under the paths so far, (1, stage); (empty, True) when there is none."""
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.catch_sigint_signal = False
        solver.parameters.cp_model_probing_level = 0  # many small models: their presolve costs more than it saves
        solver.parameters.symmetry_level = 0
        solver.parameters.relative_gap_limit = GAP
        if time_limit is not None:
            solver.parameters.max_time_in_seconds = max(0.01, time_limit)
        status = solver.solve(self.model)
        if status in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            self.last = [next(i for i, o in enumerate(group) if solver.boolean_value(o)) for group in self.chosen]
            chosen = np.stack([self.sizes[rank][i] for rank, i in enumerate(self.last)])
            return chosen.T.reshape(1, -1), True
        return np.zeros((0, 0)), status == self.cp.INFEASIBLE
