"""The best free cut of one configuration: layers to chunks, exactly, by CP-SAT and cutting planes.

With all other axes fixed the memory of a rank and every term but the pipeline are linear in the layers of its chunks,
and the length of the schedule is a maximum over paths of functions that are linear too (objectives.schedule). The
master holds only paths met so far. Each solution is evaluated exactly and its critical path added, which is valid for
every cut; when no solution is left below the best exact value that value is proven. What linear functions they are is
read off the very trees that the evaluator sums, by evaluating them on single units (splits.Probe).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from parsolve.evaluation import PIPELINE, active_limits, objective_tree
from parsolve.functions import STAGE, Array, StageMax
from parsolve.objectives.schedule import Path, Shape, critical_path, held, long_paths, makespan, shape_of
from parsolve.objectives.step_time import Items, pass_times
from parsolve.problem import Instance
from parsolve.splits import Layers, Probe, bounds, from_model_order, moe_layers, rank_cuts, saturated

RESOLUTION = 10**8
"""Ticks in the value to beat; coefficients are rounded down, so that the model is a relaxation."""
SLACK = 1e-9
"""Relative slack of float comparisons."""
GAP = 5e-4
"""A round need not find the cheapest cut under the paths so far; that none is left is proven in any case."""
_AT = {name: i for i, name in enumerate(Probe.NAMES)}


@dataclass(frozen=True)
class Form:
    """A worst-rank sum as coefficients per unit of what a rank holds; ``units[name]`` has a value a row."""

    name: str
    weight: float
    at_least_zero: bool
    units: Mapping[str, Array]
    budget: float = math.inf

    def row(self, i: int) -> dict[str, float]:
        """The coefficients of one row."""
        return {name: float(values[i]) for name, values in self.units.items()}

    def rows(self, chosen: Array) -> Form:
        """The form of some rows."""
        return replace(self, units={name: values[chosen] for name, values in self.units.items()})


@dataclass(frozen=True)
class Forms:
    """Objective summands and limits of many configurations, as linear forms."""

    objective: tuple[Form, ...]
    limits: tuple[Form, ...]

    def rows(self, chosen: Array) -> Forms:
        """The forms of some rows."""
        return Forms(*(tuple(form.rows(chosen) for form in group) for group in (self.objective, self.limits)))


def forms(
    p: Instance, values: Mapping[str, Array], shapes: Sequence[tuple[int, int]], at: Array, objective: bool = True
) -> Forms:
    """Linear forms of the rows ``values``; row i has pipeline shape ``shapes[at[i]]``.

    ``objective``: False when only the limits matter.
    """
    probe = Instance(p.problem, p.gbs, Probe(shapes))
    probe.world = p.world
    here = {**values, "split": at}

    def form(weight: float, quantity: StageMax, budget: float = math.inf) -> Form:
        size = len(at)
        leaves = [np.broadcast_to(np.asarray(part.leaf(probe, here), dtype=float), (size,)) for part in quantity.parts]
        units = {}
        for name, slot in _AT.items():
            total = np.zeros(size)
            for part, leaf in zip(quantity.parts, leaves, strict=True):
                times = part.count(probe, {**here, STAGE: slot}) if part.count else 1.0
                total = total + part.sign * leaf * times
            units[name] = total
        nothing = units["nothing"]
        units = {name: total if name == "nothing" else total - nothing for name, total in units.items()}
        for kind in ("dense", "moe"):  # of a concrete cut the same layers
            units[kind] = units[kind] + units.pop(f"{kind}_hiding")
        return Form(quantity.name, weight, quantity.at_least_zero, units, budget)

    return Forms(
        tuple(form(weight, quantity) for weight, quantity in (objective_tree(probe) if objective else ())),
        tuple(form(1.0, limit.quantity(probe), float(limit.budget(probe))) for limit in active_limits(p.problem)),
    )


@dataclass
class Paths:
    """Paths met so far, by schedule: they bound every cut of every configuration with that schedule."""

    known: dict[Shape, list[Path]] = field(default_factory=dict)

    def of(self, shape: Shape) -> list[Path]:
        """Starts with, for each rank, the way to it through first chunks, all its passes, and the way back."""
        if shape not in self.known:
            self.known[shape] = [_straight(shape, rank) for rank in range(shape.pp)]
        return self.known[shape]


def _straight(shape: Shape, rank: int) -> Path:
    counts = np.zeros(shape.pp * shape.vpp, np.int64)
    counts[:rank] = 1
    counts[rank :: shape.pp] = shape.microbatches
    return Path(counts, counts, 2 * rank)


@dataclass(frozen=True)
class Row:
    """One configuration without its cut: its linear forms, the times of its items, and its schedule."""

    objective: tuple[tuple[Form, dict[str, float]], ...]
    limits: tuple[tuple[Form, dict[str, float]], ...]
    items: Items
    shape: Shape

    @staticmethod
    def of(all_forms: Forms, all_items: Items, values: Mapping[str, Array], i: int) -> Row:
        """Row i of ``values``."""
        return Row(
            tuple((form, form.row(i)) for form in all_forms.objective),
            tuple((form, form.row(i)) for form in all_forms.limits),
            all_items.row(i),
            shape_of(int(values["pp"][i]), int(values["vpp"][i]), int(values["grad_acc"][i])),
        )


@dataclass(frozen=True)
class Contents:
    """Layers of each kind in concrete cuts: of the stages, (…, stage) in model order, and of the ranks, (…, rank)."""

    dense: Array
    moe: Array
    dense_of_rank: Array
    moe_of_rank: Array

    @staticmethod
    def of(counts: Array, layer_is_moe: tuple[bool, ...], pp: int) -> Contents:
        """Layers are dealt out in order."""
        moe = moe_layers(counts, layer_is_moe).astype(float)
        dense = counts - moe
        chunks = (*counts.shape[:-1], counts.shape[-1] // pp, pp)
        of_rank = (layers.reshape(chunks).sum(axis=-2) for layers in (dense, moe))
        return Contents(dense, moe, *of_rank)


def _moments(shape: Shape, rank: int) -> Array:
    """``held`` of a schedule on no more microbatches than matter."""
    return held(shape._replace(microbatches=int(min(shape.microbatches, saturated(shape.pp, shape.vpp)))), rank)


def _fixed(units: Mapping[str, Any], pp: int, microbatches: Any) -> Array:
    """(…, rank) what a form costs without layers: the embedding on the first rank, the output layer on the last."""
    nothing, first, last = (np.asarray(units[name])[..., None] for name in ("nothing", "first", "last"))
    in_flight = np.asarray(units["embedding_in_flight"] * np.minimum(microbatches, pp))[..., None]
    ranks = np.arange(pp)
    return np.asarray(nothing + (first + in_flight) * (ranks == 0) + last * (ranks == pp - 1))


def _rank_values(units: Mapping[str, float], of: Contents, shape: Shape) -> Array:
    """A form on every rank of cuts (without what lies ahead), array (…, rank)."""
    dense, moe = of.dense_of_rank, of.moe_of_rank
    total = _fixed(units, shape.pp, shape.microbatches) + units["dense"] * dense + units["moe"] * moe
    total = total + units["holds_moe"] * (moe > 0) + units["holds_dense"] * ((moe == 0) & (dense > 0))
    for unit, stages in ((units["dense_in_flight"], of.dense), (units["moe_in_flight"], of.moe)):
        if unit:
            of_ranks = [(stages[..., rank :: shape.pp], _moments(shape, rank)) for rank in range(shape.pp)]
            worst = [(chunks @ moments.T).max(axis=-1) for chunks, moments in of_ranks]
            total = total + unit * np.stack(worst, axis=-1)
    return np.asarray(total)


def cost_at(row: Row, of: Contents, length: Any) -> Any:
    """Objective of cuts whose schedules have that length."""
    total: Any = 0.0
    for form, units in row.objective:
        value = length if form.name == PIPELINE else _rank_values(units, of, row.shape).max(axis=-1)
        total = total + form.weight * (np.maximum(0.0, value) if form.at_least_zero else value)
    return total


def is_legal(row: Row, of: Contents) -> Array:
    """Whether cuts hold every limit."""
    legal = np.ones(of.dense.shape[:-1], dtype=bool)
    for form, units in row.limits:
        legal &= _rank_values(units, of, row.shape).max(axis=-1) <= form.budget * (1 + SLACK)
    return legal


@dataclass(frozen=True)
class Caps:
    """The most layers that each rank can hold within a value to beat and the limits, and the least that is then left.

    Arrays (row, rank); ``possible``: (row,) false where the ranks together cannot hold the model.
    """

    most: Array
    least: Array
    possible: Array


def caps(p: Instance, all_forms: Forms, values: Mapping[str, Array], to_beat: Array) -> Caps:
    """Necessary conditions, rank by rank, for rows of one pipeline shape that are to cost at most ``to_beat``.

    A rank's layers count as of the cheaper kind as far as there can be such. A rank waits for the first chunks before
    it, and holds in flight what its leanest cut would.
    """
    pp, vpp = int(values["pp"][0]), int(values["vpp"][0])
    layers = p.model.num_layers
    low, high = bounds(layers, pp, vpp)
    size = len(to_beat)
    numbers = np.arange(min(layers, int(high.sum(axis=1).max())) + 1)
    rest = np.zeros(size)
    pipeline: Form | None = None
    for form in all_forms.objective:
        if form.name == PIPELINE:
            pipeline = form
            continue
        rest = rest + _others(p, form, form.units, pp, 0, int(numbers[-1]))
    fits = np.ones((size, pp, len(numbers)), dtype=bool)
    fits &= (numbers >= low.sum(axis=1)[:, None]) & (numbers <= high.sum(axis=1)[:, None])
    fixed = np.zeros((size, pp))

    def in_time(fits: Array) -> Array:
        """What a rank can compute within the value to beat."""
        nonlocal fixed
        if pipeline is None:
            return fits
        _, least_layers = _reach(fits, numbers, layers)
        ahead = _ahead(pipeline.units, least_layers, low, vpp, _cheapest(p, pipeline.units, "_ahead"))
        fixed = pipeline.weight * (_fixed(pipeline.units, pp, values["grad_acc"]) + ahead)
        spent = fixed[:, :, None] + pipeline.weight * _at_least(p, pipeline.units, numbers, pp, vpp)
        return fits & (rest[:, None, None] + spent <= to_beat[:, None, None] * (1 + SLACK))

    fits = in_time(in_time(fits))
    if fits.any():
        reached = np.flatnonzero(fits.any(axis=(0, 1)))
        window = slice(reached[0], reached[-1] + 1)
        depths, which = np.unique(np.minimum(values["grad_acc"], saturated(pp, vpp)), return_inverse=True)
        least = np.stack(
            [[_least_held(layers, Shape(pp, vpp, m), rank)[window] for rank in range(pp)] for m in depths.tolist()]
        )[which]
        some, least = np.isfinite(least), np.where(np.isfinite(least), least, 0.0)
        for form in all_forms.limits:
            need = _fixed(form.units, pp, values["grad_acc"])[:, :, None]
            need = need + _at_least(p, form.units, numbers[window], pp, vpp)
            need = need + _cheapest(p, form.units, "_in_flight")[:, None, None] * least
            fits[:, :, window] &= some & (need <= form.budget * (1 + SLACK))
        fits = in_time(fits)
    most, least_layers = _reach(fits, numbers, layers)
    possible = np.all(fits.any(axis=2), axis=1) & (most.sum(axis=1) >= layers)
    if pipeline is not None:
        work = pipeline.weight * sum(pipeline.units[kind] * n for kind, n in _kinds(p).items())
        room = to_beat[:, None] * (1 + SLACK) - rest[:, None] - fixed
        possible &= ~(np.maximum(room, 0.0).sum(axis=1) < work)
    return Caps(most, least_layers, possible)


def _reach(fits: Array, numbers: Array, layers: int) -> tuple[Array, Array]:
    """(row, rank) the most layers that fit, and the least when all others hold their most."""
    most = np.where(fits, numbers, 0).max(axis=2)
    lowest = np.where(fits, numbers, layers).min(axis=2)
    return most, np.maximum(lowest, layers - (most.sum(axis=1)[:, None] - most))


def _ahead(units: Mapping[str, Array], least: Array, low: Array, vpp: int, per_layer: Array) -> Array:
    """(row, rank) at least the time that passes before a rank's first and after its last pass."""
    pp = low.shape[0]
    chunk = np.maximum(least // vpp, low[:, 0]).astype(float)
    if vpp > 1:  # the end chunks may hold fewer than the others
        chunk[:, 0] = low[0, 0]
    before = np.cumsum(chunk, axis=1) - chunk
    later = (np.arange(pp) > 0) * 1.0
    waits = units["embedding_ahead"][:, None] * later + units["hops_ahead"][:, None] * np.arange(pp)
    return np.asarray(waits + per_layer[:, None] * before)


@lru_cache(maxsize=2048)
def _least_held(layers: int, shape: Shape, rank: int) -> Array:
    """Layers times microbatches that a rank holds at least at its worst moment, for 0 to ``layers`` layers; inf: none.

    The ends of the pipeline look at all their cuts, the other ranks at the two level ones.
    """
    pp, vpp, *_ = shape
    moments = held(shape, rank)
    numbers = np.arange(layers + 1)
    if rank in (0, pp - 1):
        least = np.full(layers + 1, math.inf)
        most = int(bounds(layers, pp, vpp)[1].sum(axis=1).max())
        for cuts in rank_cuts(layers, pp, vpp, rank, 0, min(layers, most)).values():
            if cuts:
                sizes = np.array(cuts)
                np.minimum.at(least, sizes.sum(axis=1), (moments @ sizes.T).max(axis=0))
        return least
    low, high = (int(b.max()) for b in bounds(layers, pp, vpp))
    small, fuller = np.divmod(numbers, vpp)
    last = np.arange(vpp) >= vpp - fuller[:, None]
    either = [(moments @ (small[:, None] + side).T).max(axis=0) for side in (last, last[:, ::-1])]
    fits = (small >= low) & (small + (fuller > 0) <= high)
    return np.where(fits, np.minimum(*either), math.inf)


@dataclass
class Found:
    """The best cut of a row below the value to beat, if any; ``proven`` unless the time ran out."""

    layers: Layers | None
    cost: float
    proven: bool


class CutModel:
    """The master problem of one row: a literal for each cut that a rank may have, and the paths met so far.

    Layers of the rarer kind have variables of their own, on the stages that they can reach.
    """

    def __init__(self, p: Instance, row: Row, to_beat: float, domains: Sequence[Domain]) -> None:
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
            if form.name != PIPELINE and not any(units[name] for name in ("dense", "moe", "first", "last")):
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

    def _options(self, layers: int, domains: Sequence[Domain]) -> None:
        """Per rank the cuts of the stated domain, (option, chunk), and a literal for each."""
        fuller_first = self.model.new_bool_var("")
        self.sizes: list[Array] = []
        self.chosen: list[list[Any]] = []
        self.last: list[int] = []
        for domain in domains:
            cuts = list(dict.fromkeys([*domain[True], *domain[False]]))
            literals = [self.model.new_bool_var("") for _ in cuts]
            for literal, sizes in zip(literals, cuts, strict=True):
                if sizes not in domain[False]:
                    self.model.add_implication(literal, fuller_first)
                elif sizes not in domain[True]:
                    self.model.add_implication(literal, fuller_first.negated())
            self.model.add_exactly_one(literals)
            self.sizes.append(np.array(cuts, dtype=np.int64).reshape(len(cuts), self.shape.vpp))
            self.chosen.append(literals)
        everything = [literal for literals in self.chosen for literal in literals]
        totals = np.concatenate([sizes.sum(axis=1) for sizes in self.sizes])
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
        fixed = _fixed(units, self.shape.pp, self.shape.microbatches)[rank]
        return self._sum(rank, fixed + each * self.sizes[rank].sum(axis=1), more, scale)

    def add_path(self, path: Path) -> None:
        """The schedule is at least as long as this path."""
        if self.pipeline is None:
            return
        scale, pp = self.weight / self.tick, self.shape.pp
        fixed, dense, moe = _on_path(path, self.row.items)
        each, more = (moe, dense - moe) if self.common_is_moe else (dense, moe - dense)
        terms = [math.floor(fixed * scale)]
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


def _on_path(path: Path, of: Items) -> tuple[float, Array, Array]:
    """A path's length without layers, and what a dense or an MoE layer of each stage adds to it, (stage,), s."""
    fixed = path.transfers * of.delay + of.transfer * float(path.forward.sum() + path.backward.sum())
    for stage, (there, back) in ((0, of.embedding), (-1, of.head)):
        fixed += float(path.forward[stage]) * there + float(path.backward[stage]) * back
    dense, moe = (path.forward * there + path.backward * back for there, back in (of.dense, of.moe))
    return fixed, dense, moe


def best_cut(
    p: Instance, row: Row, to_beat: float, paths: Paths, caps_of_row: tuple[Array, Array], deadline: float = math.inf
) -> Found:
    """The cheapest legal cut of a row that costs less than ``to_beat``, with proof.

    Cuts that can be counted are kept as a list, others as a CP-SAT model.
    """
    domains = _domains(p, row, *caps_of_row)
    listed = _listed(p, row, to_beat, domains)
    master = CutModel(p, row, to_beat, domains) if listed is None else CutList(p, row, to_beat, *listed)
    known = paths.of(row.shape)
    for path in known if listed is None else known[: row.shape.pp - 1 : -1]:  # the list knows the straight ones
        master.add_path(path)
    best: Layers | None = None
    cost = to_beat
    while True:
        left = None if deadline == math.inf else deadline - time.perf_counter()
        if left is not None and left <= 0:
            return Found(best, cost, False)
        cuts, finished = master.solve(left)
        if not len(cuts):
            return Found(best, cost, finished)
        contents = [Contents.of(counts, p.model.layer_is_moe, row.shape.pp) for counts in cuts]
        times = [pass_times(row.items, of.dense, of.moe) for of in contents]
        forward, backward = (np.stack([t[i] for t in times], axis=1) for i in (0, 1))
        found = []
        for counts, of, passes, path in zip(
            cuts, contents, times, long_paths(row.shape, forward, backward, row.items.delay), strict=True
        ):
            if cost_at(row, of, path.length(*passes)) < cost * (1 - SLACK) and is_legal(row, of):
                length = makespan(row.shape, *passes)
                if length > path.length(*passes) * (1 + SLACK):
                    path = critical_path(row.shape, *passes)[1]
                value = cost_at(row, of, length)
                if value < cost * (1 - SLACK):
                    best, cost = from_model_order(counts.tolist(), row.shape.pp), value
                    master.improve(cost)
            found.append(path)
        master.forbid()
        known += found
        for path in found:
            master.add_path(path)


Domain = dict[bool, list[tuple[int, ...]]]


def _domains(p: Instance, row: Row, most: Array, least: Array) -> list[Domain]:
    """``rank_cuts`` of each rank, without those that break a limit whatever the other ranks hold."""
    pp, vpp, *_ = row.shape
    result = []
    for rank in range(pp):
        domain = rank_cuts(p.model.num_layers, pp, vpp, rank, int(least[rank]), int(most[rank]))
        for side, cuts in domain.items():
            sizes = np.array(cuts, dtype=np.int64).reshape(len(cuts), vpp)
            fits = np.ones(len(cuts), dtype=bool)
            for form, units in row.limits:
                fits &= _needs(p, row, units, rank, sizes) <= form.budget * (1 + SLACK)
            domain[side] = [cut for cut, fit in zip(cuts, fits.tolist(), strict=True) if fit]
        result.append(domain)
    return result


def _needs(p: Instance, row: Row, units: Mapping[str, float], rank: int, sizes: Array) -> Array:
    """(option,) what a rank needs at least; exact where all layers that it can hold are of one kind."""
    pp = row.shape.pp
    names = [k for k in _kinds(p) if _reachable(p.model.layer_is_moe, k == "moe", pp, row.shape.vpp)[rank]]
    each, in_flight, holds = (
        min((units[prefix + name + suffix] for name in names), default=0.0)
        for prefix, suffix in (("", ""), ("", "_in_flight"), ("holds_", ""))
    )
    fixed, layers = _fixed(units, pp, row.shape.microbatches)[rank], sizes.sum(axis=1)
    flying = (_moments(row.shape, rank) @ sizes.T).max(axis=0)
    return np.asarray(fixed + each * layers + in_flight * flying + holds * (layers > 0))


SPARSE = 0.3
"""Cuts out of the race are dropped from the list when they are at least this share of it."""
AT_ONCE = 16
"""Listed cuts evaluated in one round."""
MAX_LISTED = 3_000_000
"""Cuts of a row are listed when they have no more stages than this in all."""


def _listed(p: Instance, row: Row, to_beat: float, domains: Sequence[Domain]) -> tuple[Array, Array] | None:
    """All cuts that the straight paths allow, (cut, stage) in model order, and their lengths; None: too many."""
    pp, vpp, *_ = row.shape
    layers = p.model.num_layers
    totals_of = [[sum(cut) for cuts in domain.values() for cut in cuts] for domain in domains]
    if not all(totals_of):
        return np.zeros((0, pp * vpp), np.int16), np.zeros(0)
    pipeline = next(((form.weight, units) for form, units in row.objective if form.name == PIPELINE), None)
    rest = sum(
        float(_others(p, form, units, pp, min(map(min, totals_of)), max(map(max, totals_of))))
        for form, units in row.objective
        if form.name != PIPELINE
    )
    room = to_beat * (1 + SLACK) - rest
    if pipeline is not None:
        weight, units = pipeline
        fixed = _fixed(units, pp, row.shape.microbatches)
        fixed = fixed + (np.arange(pp) > 0) * units["embedding_ahead"] + np.arange(pp) * units["hops_ahead"]
        busy = fixed[:, None] + _at_least(p, units, np.arange(layers + 1), pp, vpp)
        per_layer_ahead = _cheapest(p, units, "_ahead")
    blocks, lengths = [np.zeros((0, pp * vpp), np.int16)], [np.zeros(0)]
    for side in (False, True):
        options = [np.array(domain[side], dtype=np.int16).reshape(-1, vpp) for domain in domains]
        if any(not len(sizes) for sizes in options):
            continue
        totals = [sizes.sum(axis=1, dtype=np.int64) for sizes in options]
        after_least = [sum(int(t.min()) for t in totals[i + 1 :]) for i in range(pp)]
        after_most = [sum(int(t.max()) for t in totals[i + 1 :]) for i in range(pp)]
        chosen, sums, ahead, longest = np.zeros((1, 0), np.int16), np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
        for i, total in enumerate(totals):
            if len(chosen) * len(total) > MAX_LISTED:
                return None
            grown = (sums[:, None] + total[None, :]).ravel()
            keep = (grown + after_least[i] <= layers) & (grown + after_most[i] >= layers)
            waits, length = np.repeat(ahead, len(total)), np.repeat(longest, len(total))
            if pipeline is not None:
                length = np.maximum(length, waits + np.tile(busy[i][total], len(chosen)))
                keep &= weight * length <= room
                waits = waits + np.tile(per_layer_ahead * options[i][:, 0], len(chosen))
            left, right = np.divmod(np.flatnonzero(keep), len(total))
            chosen = np.column_stack((chosen[left], right.astype(np.int16)))
            sums, ahead, longest = grown[keep], waits[keep], length[keep]
            if len(chosen) * pp * vpp > MAX_LISTED:
                return None
        if side:  # what is level on all ranks is in the other block
            level = [np.array([cut in set(domain[False]) for cut in domain[True]]) for domain in domains]
            other = ~np.all([known[chosen[:, i]] for i, known in enumerate(level)], axis=0)
            chosen, longest = chosen[other], longest[other]
        picked = [sizes[chosen[:, i]] for i, sizes in enumerate(options)]
        blocks.append(np.stack(picked, axis=2).reshape(len(chosen), pp * vpp))
        lengths.append(longest)
    return np.concatenate(blocks), np.concatenate(lengths)


def _kinds(p: Instance) -> dict[str, int]:
    """Layers of each kind that the model has."""
    counts = {"dense": p.model.num_dense_layers, "moe": p.model.num_moe_layers}
    return {kind: n for kind, n in counts.items() if n}


def _cheapest(p: Instance, units: Mapping[str, Any], suffix: str = "") -> Any:
    return np.min([units[kind + suffix] for kind in _kinds(p)], axis=0)


@lru_cache(maxsize=256)
def _reachable(layer_is_moe: tuple[bool, ...], moe: bool, pp: int, vpp: int) -> Array:
    """(rank,) layers of a kind that do not certainly lie on earlier stages than the rank's first."""
    low = bounds(len(layer_is_moe), pp, vpp)[0][:, 0]
    of_kind = np.array([kind == moe for kind in layer_is_moe])
    after = np.append(np.cumsum(of_kind[::-1])[::-1], 0)
    return np.asarray(after[np.minimum(np.cumsum(low) - low, len(of_kind))])


def _at_least(p: Instance, units: Mapping[str, Any], numbers: Array, pp: int, vpp: int) -> Array:
    """(…, rank, number) what so many layers cost when as many as there can be are of the cheaper kind."""
    kinds = list(_kinds(p))
    of = np.stack([np.asarray(units[kind]) for kind in kinds])
    there = np.stack([_reachable(p.model.layer_is_moe, kind == "moe", pp, vpp) for kind in kinds])
    cheap = np.minimum(numbers, there[np.argmin(of, axis=0)][..., None])
    low, high = of.min(axis=0)[..., None, None], of.max(axis=0)[..., None, None]
    return np.asarray(low * cheap + high * (numbers - cheap))


def _others(p: Instance, form: Form, units: Mapping[str, Any], pp: int, low: int, high: int) -> Any:
    """At least what a term but the pipeline costs: its mean over the ranks, or its first or last rank's part.

    ``low``, ``high``: least and most layers of a rank.
    """
    mean = units["nothing"] + units["first"] / pp + units["last"] / pp
    mean = mean + sum(units[kind] * n / pp for kind, n in _kinds(p).items())
    each = _cheapest(p, units)
    layers = np.where(each < 0, each * high, each * low)
    ends = units["nothing"] + np.maximum(units["first"], units["last"]) + layers
    least = np.maximum(mean, ends)
    return form.weight * (np.maximum(least, 0.0) if form.at_least_zero else least)


class CutList:
    """All cuts of one row with the longest of the known paths of each."""

    def __init__(self, p: Instance, row: Row, to_beat: float, counts: Array, length: Array) -> None:
        self.row, self.to_beat = row, to_beat
        self.counts, self.length = counts, length
        of = Contents.of(counts, p.model.layer_is_moe, row.shape.pp)
        self.dense, self.moe = of.dense, of.moe
        self.rest = np.broadcast_to(cost_at(row, of, 0.0), (len(counts),))
        self.weight = next((form.weight for form, _ in row.objective if form.name == PIPELINE), 0.0)
        alike = len(_kinds(p)) == 1  # then the domains hold legal cuts only
        self.alive = np.ones(len(counts), dtype=bool) if alike else is_legal(row, of)
        self.given: Array = np.zeros(0, np.int64)

    def add_path(self, path: Path) -> None:
        """The schedule is at least as long as this path."""
        fixed, dense, moe = _on_path(path, self.row.items)
        self.length = np.maximum(self.length, fixed + self.dense @ dense + self.moe @ moe)
        self._drop(SPARSE)

    def _drop(self, share: float) -> None:
        """Forget cuts that are out of the race, if they are at least so large a share."""
        keep = self.alive & (self.rest + self.weight * self.length < self.to_beat * (1 - SLACK))
        if int(keep.sum()) < (1 - share) * len(keep):
            for name in ("counts", "dense", "moe", "rest", "length"):
                setattr(self, name, getattr(self, name)[keep])
            self.alive = np.ones(int(keep.sum()), dtype=bool)
            self.given = np.zeros(0, np.int64)

    def improve(self, cost: float) -> None:
        """Only cuts that beat ``cost``."""
        self.to_beat = cost

    def forbid(self) -> None:
        """Not the last cuts again."""
        self.alive[self.given] = False

    def solve(self, time_limit: float | None) -> tuple[Array, bool]:
        """The cheapest cuts under the paths so far, (cut, stage); none when none is left that beats the cost."""
        self._drop(0.0)
        bound = self.rest + self.weight * self.length
        few = min(AT_ONCE, len(bound))
        self.given = np.argpartition(bound, few - 1)[:few] if few else np.zeros(0, np.int64)
        return self.counts[self.given].astype(np.int64), True
