"""The best free cut of one configuration: layers to chunks, exactly, by CP-SAT and cutting planes.

With all other axes fixed the memory of a rank and every term but the pipeline are linear in the layers of its chunks, and
the length of the schedule is a maximum over paths of functions that are linear too (objectives.schedule). The model
holds only paths met so far. Each solution is evaluated exactly and its critical path added, which is valid for every
cut; when no solution is left below the best exact value that value is proven. What linear functions they are is read off
the very trees that the evaluator sums, by evaluating them on single units (splits.Probe).
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
from parsolve.objectives.schedule import Path, Shape, critical_path, held
from parsolve.objectives.step_time import Items, pass_times
from parsolve.problem import Instance
from parsolve.splits import Layers, Probe, bounds, from_model_order, rank_cuts, saturated

RESOLUTION = 10**8
"""Ticks in the value to beat; coefficients are rounded down, so that the model is a relaxation."""
SLACK = 1e-9
"""Relative slack of float comparisons."""
_AT = {name: i for i, name in enumerate(Probe.NAMES)}


@dataclass(frozen=True)
class Form:
    """A worst-rank sum as coefficients per unit of what a rank holds; ``units[name]`` is an array with a value a row."""

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


def forms(p: Instance, values: Mapping[str, Array], shapes: Sequence[tuple[int, int]], at: Array) -> Forms:
    """Linear forms of the rows ``values``; row i has pipeline shape ``shapes[at[i]]``."""
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
        return Form(quantity.name, weight, quantity.at_least_zero, units, budget)

    return Forms(
        tuple(form(weight, quantity) for weight, quantity in objective_tree(probe)),
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


    def arrays(self, shape: Shape, of: Items) -> tuple[Array, Array, Array]:
        """(path, stage) passes forward and backward, and (path,) what does not depend on the layers, s."""
        known = self.of(shape)
        forward, backward = np.stack([x.forward for x in known]), np.stack([x.backward for x in known])
        passes = forward.sum(axis=1) + backward.sum(axis=1)
        fixed = np.array([x.transfers for x in known]) * of.delay + passes * of.transfer
        for stage, (there, back) in ((0, of.embedding), (-1, of.head)):
            fixed = fixed + forward[:, stage] * there + backward[:, stage] * back
        return forward, backward, fixed


def _straight(shape: Shape, rank: int) -> Path:
    counts = np.zeros(shape.pp * shape.vpp, np.int64)
    counts[:rank] = 1
    counts[rank :: shape.pp] = shape.microbatches
    return Path(counts, counts, 2 * rank)


@dataclass(frozen=True)
class Row:
    """One configuration without its cut: scalar axis values, its linear forms, and the times of its items."""

    values: Mapping[str, int]
    objective: tuple[tuple[Form, dict[str, float]], ...]
    limits: tuple[tuple[Form, dict[str, float]], ...]
    items: Items
    shape: Shape

    @staticmethod
    def of(all_forms: Forms, all_items: Items, values: Mapping[str, Array], i: int) -> Row:
        """Row i of ``values``."""
        here = {axis: int(column[i]) for axis, column in values.items() if axis != "split"}
        return Row(
            here,
            tuple((form, form.row(i)) for form in all_forms.objective),
            tuple((form, form.row(i)) for form in all_forms.limits),
            all_items.row(i),
            Shape(here["pp"], here["vpp"], here["grad_acc"]),
        )


@dataclass(frozen=True)
class Contents:
    """What the ranks of a concrete cut hold: layers of each kind, arrays (stage,) in model order."""

    dense: Array
    moe: Array

    @staticmethod
    def of(counts: Array, layer_is_moe: Sequence[bool]) -> Contents:
        """Layers are dealt out in order."""
        prefix = np.concatenate(([0], np.cumsum(layer_is_moe))).astype(np.int64)
        ends = np.cumsum(counts)
        moe = prefix[ends] - prefix[ends - counts]
        return Contents(counts - moe, moe)


def _rank_values(row: Row, units: Mapping[str, float], of: Contents, shape: Shape) -> Array:
    """A form on every rank of a cut (without what lies ahead), array (rank,)."""
    pp, vpp = shape.pp, shape.vpp
    dense, moe = (layers.reshape(vpp, pp).T for layers in (of.dense, of.moe))
    depth = Shape(pp, vpp, int(min(shape.microbatches, saturated(pp, vpp))))
    total = np.full(pp, units["nothing"])
    total[0] += units["first"] + units["embedding_in_flight"] * min(shape.microbatches, pp)
    total[-1] += units["last"]
    total += units["dense"] * dense.sum(axis=1) + units["moe"] * moe.sum(axis=1)
    has_moe = moe.sum(axis=1) > 0
    total += units["holds_moe"] * has_moe + units["holds_dense"] * (~has_moe & (dense.sum(axis=1) > 0))
    for unit, layers in ((units["dense_in_flight"], dense), (units["moe_in_flight"], moe)):
        if unit:
            total += unit * np.array([(held(depth, r) @ layers[r]).max() for r in range(pp)])
    return total


def exact_cost(row: Row, of: Contents) -> tuple[float, bool, Path]:
    """Objective, legality and critical path of one cut."""
    length, path = critical_path(row.shape, *pass_times(row.items, of.dense, of.moe))
    total = 0.0
    for form, units in row.objective:
        value = length if form.name == PIPELINE else float(_rank_values(row, units, of, row.shape).max())
        total += form.weight * (max(0.0, value) if form.at_least_zero else value)
    legal = all(
        float(_rank_values(row, units, of, row.shape).max()) <= form.budget * (1 + SLACK) for form, units in row.limits
    )
    return total, legal, path


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

    Layers count with the cheaper kind's time and bytes. A rank waits for the first chunks before it; it holds as many
    layers in flight as the fewest layers a chunk allow.
    """
    pp, vpp = int(values["pp"][0]), int(values["vpp"][0])
    layers = p.model.num_layers
    low, high = bounds(layers, pp, vpp)
    size = len(to_beat)
    numbers = np.arange(min(layers, int(high.sum(axis=1).max())) + 1)
    kinds = [k for k, n in (("dense", p.model.num_dense_layers), ("moe", p.model.num_moe_layers)) if n]
    share = {
        "dense": p.model.num_dense_layers / pp,
        "moe": p.model.num_moe_layers / pp,
        "first": 1 / pp,
        "last": 1 / pp,
    }
    first, last = np.zeros(pp), np.zeros(pp)
    first[0] = last[-1] = 1.0

    def cheapest(units: Mapping[str, Array], suffix: str = "") -> Array:
        return np.min([units[kind + suffix] for kind in kinds], axis=0)

    def ends(units: Mapping[str, Array]) -> Array:
        fixed = units["nothing"][:, None] + units["first"][:, None] * first + units["last"][:, None] * last
        return np.asarray(fixed)

    rest = np.zeros(size)
    pipeline: Form | None = None
    for form in all_forms.objective:
        if form.name == PIPELINE:
            pipeline = form
            continue
        mean = form.units["nothing"] + sum(form.units[name] * part for name, part in share.items())
        rest = rest + form.weight * (np.maximum(mean, 0.0) if form.at_least_zero else mean)
    fits = np.ones((size, pp, len(numbers)), dtype=bool)
    fits &= (numbers >= low.sum(axis=1)[:, None]) & (numbers <= high.sum(axis=1)[:, None])
    fixed = np.zeros((size, pp))

    def in_time(fits: Array) -> Array:
        """What a rank can compute within the value to beat."""
        nonlocal fixed
        if pipeline is None:
            return fits
        _, least_layers = _reach(fits, numbers, layers)
        ahead = _ahead(pipeline.units, least_layers, low, vpp, cheapest)
        fixed = pipeline.weight * (ends(pipeline.units) + ahead)
        each = pipeline.weight * cheapest(pipeline.units)
        spent = fixed[:, :, None] + each[:, None, None] * numbers
        return fits & (rest[:, None, None] + spent <= to_beat[:, None, None] * (1 + SLACK))

    fits = in_time(in_time(fits))
    if fits.any():
        window = np.flatnonzero(fits.any(axis=(0, 1)))
        window = numbers[window[0] : window[-1] + 1]
        fits &= (numbers >= window[0]) & (numbers <= window[-1])
        depths = np.minimum(values["grad_acc"], int(saturated(pp, vpp)))
        for m in np.unique(depths).tolist():
            here = np.flatnonzero(depths == m)
            shape = Shape(pp, vpp, int(m))
            least = np.array([[_least_held(layers, shape, r, int(n)) for n in window] for r in range(pp)])
            for form in all_forms.limits:
                per_layer, per_held = cheapest(form.units)[here], cheapest(form.units, "_in_flight")[here]
                first_in_flight = form.units["embedding_in_flight"] * np.minimum(values["grad_acc"], pp)
                base = ends(form.units)[here] + first_in_flight[here][:, None] * first
                need = base[:, :, None] + per_layer[:, None, None] * window
                need = need + np.where(np.isinf(least), math.inf, per_held[:, None, None] * np.minimum(least, 1e18))
                part = fits[np.ix_(here, np.arange(pp), window)]
                fits[np.ix_(here, np.arange(pp), window)] = part & (need <= form.budget * (1 + SLACK))
        fits = in_time(fits)
    most, least_layers = _reach(fits, numbers, layers)
    possible = fits.any(axis=2).all(axis=1) & (most.sum(axis=1) >= layers)
    if pipeline is not None:
        work = pipeline.weight * sum(
            pipeline.units[k] * n for k, n in (("dense", p.model.num_dense_layers), ("moe", p.model.num_moe_layers))
        )
        room = to_beat[:, None] * (1 + SLACK) - rest[:, None] - fixed
        possible &= ~(np.maximum(room, 0.0).sum(axis=1) < work)
    return Caps(most, least_layers, possible)


def _reach(fits: Array, numbers: Array, layers: int) -> tuple[Array, Array]:
    """(row, rank) the most layers that fit, and the least when all others hold their most."""
    most = np.where(fits, numbers, 0).max(axis=2)
    lowest = np.where(fits, numbers, layers).min(axis=2)
    return most, np.maximum(lowest, layers - (most.sum(axis=1)[:, None] - most))


def _ahead(units: Mapping[str, Array], least: Array, low: Array, vpp: int, cheapest: Any) -> Array:
    """(row, rank) at least the time that passes before a rank's first and after its last pass."""
    pp = low.shape[0]
    chunk = np.maximum(least // vpp, low[:, 0]).astype(float)
    if vpp > 1:  # the end chunks may hold fewer than the others
        chunk[:, 0] = low[0, 0]
    before = np.cumsum(chunk, axis=1) - chunk
    per_layer = cheapest(units, "_ahead")
    later = (np.arange(pp) > 0) * 1.0
    waits = units["embedding_ahead"][:, None] * later + units["hops_ahead"][:, None] * np.arange(pp)
    return np.asarray(waits + per_layer[:, None] * before)


@lru_cache(maxsize=4096)
def _least_held(layers: int, shape: Shape, rank: int, number: int) -> float:
    """Layers times microbatches that a rank with ``number`` layers holds at least at its worst moment; inf: no cut."""
    cuts = rank_cuts(layers, shape.pp, shape.vpp, rank, number, number)
    if not cuts:
        return math.inf
    return float((held(shape, rank) @ np.array(cuts).T).max(axis=0).min())


def refuted(p: Instance, row: Row, to_beat: float, paths: Paths, most: Array, least: Array) -> bool:
    """Whether some path alone shows that no cut within the ranks' reach costs less than ``to_beat``.

    Layers, with the cheaper kind's time, are put where the path passes least often.
    """
    pp, vpp, *_ = row.shape
    rest, weight = 0.0, 0.0
    share = {"dense": p.model.num_dense_layers / pp, "moe": p.model.num_moe_layers / pp, "first": 1 / pp, "last": 1 / pp}
    for form, units in row.objective:
        if form.name == PIPELINE:
            weight = form.weight
            continue
        mean = units["nothing"] + sum(units[name] * part for name, part in share.items())
        rest += form.weight * (max(0.0, mean) if form.at_least_zero else mean)
    if not weight:
        return False
    low, high = least // vpp, -(-most // vpp)
    if vpp > 1:
        high[[0, -1]] = -(-most[[0, -1]] // (vpp - 1))
    low, high = np.tile(low, vpp), np.tile(high, vpp)
    low[[0, -1]] = 0
    kinds = [t for t, n in ((row.items.dense, p.model.num_dense_layers), (row.items.moe, p.model.num_moe_layers)) if n]
    forward, backward, fixed = paths.arrays(row.shape, row.items)
    each = np.min([forward * t[0] + backward * t[1] for t in kinds], axis=0)
    order = np.argsort(each, axis=1)
    room = (high - low)[order]
    before = np.cumsum(room, axis=1) - room
    taken = np.clip(p.model.num_layers - low.sum() - before, 0, room)
    length = fixed + each @ low + (np.take_along_axis(each, order, axis=1) * taken).sum(axis=1)
    return bool((rest + weight * length > to_beat * (1 + SLACK)).any())


@dataclass
class Found:
    """The best cut of a row below the value to beat, if any; ``proven`` unless the time ran out."""

    layers: Layers | None
    cost: float
    proven: bool
    rounds: int


class CutModel:
    """The master problem of one row: chunk sizes, their consequences, and the paths met so far."""

    def __init__(self, p: Instance, row: Row, to_beat: float, most: Array, least: Array) -> None:
        from ortools.sat.python import cp_model

        self.cp, self.row, self.shape = cp_model, row, row.shape
        self.model = cp_model.CpModel()
        self.is_moe = p.model.layer_is_moe
        self.tick = to_beat / RESOLUTION
        self.kinds = (p.model.num_dense_layers > 0, p.model.num_moe_layers > 0)
        self._chunks(p.model.num_layers, most, least)
        self._kinds()
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
                    self.model.add(variable >= self._rank_sum(units, rank, form.weight / self.tick))
        room = RESOLUTION - math.floor(constant / self.tick)
        self.model.add(cp_model.LinearExpr.sum(self.values) <= room)
        self.model.minimize(cp_model.LinearExpr.sum(self.values))
        for form, units in row.limits:
            for rank in range(self.shape.pp):
                self._limit(form, units, rank)

    def _chunks(self, layers: int, most: Array, least: Array) -> None:
        """A variable for the layers of each stage, every rank's within the stated domain."""
        pp, vpp, *_ = self.shape
        high = int(bounds(layers, pp, vpp)[1].max())
        self.count = [self.model.new_int_var(0, high, f"n{s}") for s in range(pp * vpp)]
        self.model.add(self.cp.LinearExpr.sum(self.count) == layers)
        for rank in range(pp):
            allowed = rank_cuts(layers, pp, vpp, rank, int(least[rank]), int(most[rank]))
            self.model.add_allowed_assignments(self.count[rank::pp], allowed)

    def _kinds(self) -> None:
        """Layers of each kind on every stage, linear expressions."""
        if not all(self.kinds):
            zero = [0] * len(self.count)
            self.dense, self.moe = (self.count, zero) if self.kinds[0] else (zero, self.count)
            return
        prefix = np.concatenate(([0], np.cumsum([not moe for moe in self.is_moe]))).tolist()
        self.dense, self.moe = [], []
        end: Any = 0
        before: Any = 0
        for n in self.count:
            total = self.model.new_int_var(0, len(self.is_moe), "")
            self.model.add(total == end + n)
            so_far = self.model.new_int_var(0, int(prefix[-1]), "")
            self.model.add_element(total, prefix, so_far)
            self.dense.append(so_far - before)
            self.moe.append(n - so_far + before)
            end, before = total, so_far

    def _rank_sum(self, units: Mapping[str, float], rank: int, scale: float) -> Any:
        """A form on one rank in ticks, rounded down; in-flight parts apart."""
        pp = self.shape.pp
        fixed = units["nothing"] + units["first"] * (rank == 0) + units["last"] * (rank == pp - 1)
        if rank == 0:
            fixed += units["embedding_in_flight"] * min(self.shape.microbatches, pp)
        terms = [math.floor(fixed * scale)]
        for name, layers in (("dense", self.dense), ("moe", self.moe)):
            each = math.floor(units[name] * scale)
            if each:
                terms.append(each * self.cp.LinearExpr.sum(list(layers[rank::pp])))
        return self.cp.LinearExpr.sum(terms)

    def _limit(self, form: Form, units: Mapping[str, float], rank: int) -> None:
        """A limit on one rank at its fullest moment, with its working set."""
        pp, vpp, m, kind = self.shape
        scale = RESOLUTION / max(form.budget, 1e-9)
        total = [self._rank_sum(units, rank, scale)]
        moments = held(Shape(pp, vpp, int(min(m, saturated(pp, vpp))), kind), rank)
        order = np.argsort(-moments.sum(axis=1), kind="stable")[:3]
        if all(self.kinds):
            if units["holds_moe"]:
                has = self.model.new_bool_var("")
                for n in self.moe[rank::pp]:
                    self.model.add(n == 0).only_enforce_if(has.negated())
                total.append(math.floor(units["holds_moe"] * scale) * has)
        else:
            one = units["holds_dense"] if self.kinds[0] else units["holds_moe"]
            if one and rank not in (0, pp - 1):
                total.append(math.floor(one * scale))
        for at in order.tolist():
            terms = list(total)
            for name, layers in (("dense_in_flight", self.dense), ("moe_in_flight", self.moe)):
                each = math.floor(units[name] * scale)
                if each:
                    for chunk, n in enumerate(layers[rank::pp]):
                        if moments[at, chunk]:
                            terms.append(each * int(moments[at, chunk]) * n)
            self.model.add(self.cp.LinearExpr.sum(terms) <= RESOLUTION)

    def add_path(self, path: Path) -> None:
        """The schedule is at least as long as this path."""
        if self.pipeline is None:
            return
        of, scale = self.row.items, self.weight / self.tick
        fixed = path.transfers * of.delay + of.transfer * float(path.forward.sum() + path.backward.sum())
        terms: list[Any] = []
        for s, (f, b) in enumerate(zip(path.forward.tolist(), path.backward.tolist(), strict=True)):
            if s == 0:
                fixed += f * of.embedding[0] + b * of.embedding[1]
            if s == len(self.count) - 1:
                fixed += f * of.head[0] + b * of.head[1]
            for layers, unit in ((self.dense, of.dense), (self.moe, of.moe)):
                each = math.floor((f * unit[0] + b * unit[1]) * scale)
                if each and not isinstance(layers[s], int):
                    terms.append(each * layers[s])
        terms.append(math.floor(fixed * scale))
        self.model.add(self.pipeline >= self.cp.LinearExpr.sum(terms))

    def forbid(self, counts: Array) -> None:
        """Not this cut again."""
        self.model.add_forbidden_assignments(self.count, [tuple(int(n) for n in counts)])

    def improve(self, cost: float) -> None:
        """Only cuts that beat ``cost``."""
        self.model.add(self.cp.LinearExpr.sum(self.values) <= math.floor(cost / self.tick))

    def solve(self, time_limit: float | None, workers: int = 1) -> tuple[Array | None, bool]:
        """The cheapest cut under the paths so far; (None, True) when there is none."""
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        solver.parameters.catch_sigint_signal = False
        if time_limit is not None:
            solver.parameters.max_time_in_seconds = max(0.01, time_limit)
        status = solver.solve(self.model)
        if status in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return np.array([solver.value(n) for n in self.count]), True
        return None, status == self.cp.INFEASIBLE


def best_cut(
    p: Instance, row: Row, to_beat: float, paths: Paths, caps_of_row: tuple[Array, Array], deadline: float = math.inf
) -> Found:
    """The cheapest legal cut of a row that costs less than ``to_beat``, with proof."""
    model = CutModel(p, row, to_beat, *caps_of_row)
    known = paths.of(row.shape)
    for path in known:
        model.add_path(path)
    best: Layers | None = None
    cost, rounds = to_beat, 0
    while True:
        left = None if deadline == math.inf else deadline - time.perf_counter()
        if left is not None and left <= 0:
            return Found(best, cost, False, rounds)
        counts, finished = model.solve(left)
        rounds += 1
        if counts is None:
            return Found(best, cost, finished, rounds)
        value, legal, path = exact_cost(row, Contents.of(counts, p.model.layer_is_moe))
        if legal and value < cost * (1 - SLACK):
            best, cost = from_model_order(counts.tolist(), row.shape.pp), value
            model.improve(cost)
        known.append(path)
        model.add_path(path)
        model.forbid(counts)
