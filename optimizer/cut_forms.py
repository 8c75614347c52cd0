"""What cuts of one configuration cost and need, as linear forms of the layers that each rank holds.

With all other axes fixed the memory of a rank and every term but the pipeline are linear in the layers of its chunks,
and the schedule's length is a maximum over paths of functions that are linear too (objectives.schedule_paths). What
linear functions they are is read off the very trees that the evaluator sums, by evaluating them on single units
(splits.Probe).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from parsolve.evaluation import PIPELINE, active_limits, objective_tree
from parsolve.functions import STAGE, Array, Function, Points, StageMax
from parsolve.objectives.schedule import Shape, held, shape_of
from parsolve.objectives.schedule_paths import Path
from parsolve.objectives.step_time import Items
from parsolve.problem import Instance
from parsolve.splits import Probe, moe_layers, saturated

SLACK = 1e-9
"""Relative slack of float comparisons."""
_AT = {name: i for i, name in enumerate(Probe.NAMES)}


class Units(Mapping[str, Any]):
    """Coefficients per unit of what a rank holds, by its name: numbers, or arrays of equal shape."""

    def __init__(self, place: Mapping[str, int], table: Array) -> None:
        """``table``: (name, …)."""
        self.place, self.table = place, table

    @staticmethod
    def of(units: Mapping[str, Array]) -> Units:
        """The same as one array."""
        return Units({name: i for i, name in enumerate(units)}, np.stack(list(units.values())))

    def __getitem__(self, name: str) -> Any:
        return self.table[self.place[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)

    def at(self, rows: Array | slice, *further: None) -> Units:
        """Those of some rows; ``further`` axes of one place after them."""
        return Units(self.place, self.table[(slice(None), rows, *further)])

    def row(self, i: int) -> dict[str, float]:
        """Those of one row."""
        return dict(zip(self.place, self.table[:, i].tolist(), strict=True))


@dataclass(frozen=True)
class Form:
    """A worst-rank sum as coefficients per unit of what a rank holds; ``units[name]`` has a value a row."""

    name: str
    weight: float
    at_least_zero: bool
    units: Units
    budget: float = math.inf

    def rows(self, chosen: Array | slice) -> Form:
        """The form of some rows."""
        return replace(self, units=self.units.at(chosen))


@dataclass(frozen=True)
class Forms:
    """Objective summands and limits of many configurations, as linear forms."""

    objective: tuple[Form, ...]
    limits: tuple[Form, ...]

    @property
    def pipeline(self) -> Form | None:
        """The schedule's term, where the objective has one."""
        return next((form for form in self.objective if form.name == PIPELINE), None)

    @property
    def others(self) -> tuple[Form, ...]:
        """The other terms of the objective."""
        return tuple(form for form in self.objective if form.name != PIPELINE)

    def rows(self, chosen: Array | slice) -> Forms:
        """The forms of some rows."""
        return Forms(*(tuple(form.rows(chosen) for form in group) for group in (self.objective, self.limits)))


def forms(p: Instance, values: Mapping[str, Array], objective: bool = True) -> Forms:
    """Linear forms of the rows ``values``, whose cuts count for no more than whether ``mtp_apart``.

    ``objective``: False when only the limits matter.
    """
    apart = p.splits.mtp_apart[values["split"]]
    shapes, at = np.unique(np.stack((values["pp"], values["vpp"], apart)), axis=1, return_inverse=True)
    at = at.ravel()
    probe = Instance(p.problem, p.gbs, Probe(shapes[0], shapes[1], shapes[2].astype(bool)))
    probe.world = p.world
    in_flight = p.splits.mtp_microbatches(values["split"], values["grad_acc"])
    points, here = Points.of(p, values), Points(probe, {**values, "split": at})
    slots = {"split": np.arange(shapes.shape[1])[:, None], STAGE: np.arange(len(_AT)), "grad_acc": 1}
    one_of_each = Points(probe, slots)

    def of_rows(function: Function) -> Any:
        return function(probe, here) if "split" in function.axes else function(p, points)

    def form(weight: float, quantity: StageMax, budget: float = math.inf) -> Form:
        units = {name: np.zeros(len(at)) for name in _AT}
        for part in quantity.parts:
            leaf = part.sign * of_rows(part.term) * (of_rows(part.weight) if part.weight else 1.0)
            # how often it is paid for one unit of each thing, (shape, thing); under 1F1B at any number of microbatches
            times = np.broadcast_to(part.count(probe, one_of_each) if part.count else 1.0, (shapes.shape[1], len(_AT)))
            for name, slot in _AT.items():
                if times[:, slot].any():
                    units[name] += leaf * times[at, slot]
        nothing = units["nothing"]
        units = {name: total if name == "nothing" else total - nothing for name, total in units.items()}
        for kind in ("dense", "moe"):  # of a concrete cut the same layers
            units[kind] = units[kind] + units.pop(f"{kind}_hiding")
        modules = units.pop("mtp") + in_flight * units.pop("mtp_in_flight")
        units["last"], units["before_last"] = units["last"] + ~apart * modules, apart * modules
        return Form(quantity.name, weight, quantity.at_least_zero, Units.of(units), budget)

    return Forms(
        tuple(form(weight, quantity) for weight, quantity in (objective_tree(probe) if objective else ())),
        tuple(form(1.0, limit.quantity(probe), float(limit.budget(probe))) for limit in active_limits(p.problem)),
    )


@dataclass(frozen=True)
class Row:
    """One configuration without its cut: its linear forms, the times of its items, and its schedule."""

    objective: tuple[tuple[Form, Mapping[str, Any]], ...]
    limits: tuple[tuple[Form, Mapping[str, Any]], ...]
    items: Items
    shape: Shape

    @property
    def weight(self) -> float:
        """What a second of the schedule counts in the objective."""
        return next((form.weight for form, _ in self.objective if form.name == PIPELINE), 0.0)

    @staticmethod
    def of(all_forms: Forms, all_items: Items, values: Mapping[str, Array], i: int) -> Row:
        """Row i of ``values``."""
        return Row(
            tuple((form, form.units.row(i)) for form in all_forms.objective),
            tuple((form, form.units.row(i)) for form in all_forms.limits),
            all_items.row(i),
            shape_of(int(values["pp"][i]), int(values["vpp"][i]), int(values["grad_acc"][i])),
        )

    @staticmethod
    def many(all_forms: Forms, all_items: Items, shape: Shape, rows: Array) -> Row:
        """Rows with one schedule at once: every value has an axis for them, and a further one for cuts."""
        objective, limits = (
            tuple((form, form.units.at(rows, None)) for form in group)
            for group in (all_forms.objective, all_forms.limits)
        )
        return Row(objective, limits, all_items.rows((rows, None)), shape)


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


@lru_cache(maxsize=4096)
def moments(shape: Shape, rank: int) -> Array:
    """``held`` of a schedule on no more microbatches than matter."""
    return held(shape._replace(microbatches=int(min(shape.microbatches, saturated(shape.pp, shape.vpp)))), rank)


def fixed(units: Mapping[str, Any], pp: int, microbatches: Any) -> Array:
    """(…, rank) what a form costs without layers: the embedding on the first rank, the output layer on the last.

    Prediction modules are on the last, or on the one before it.
    """
    nothing, first, last, before_last = (
        np.asarray(units[name])[..., None] for name in ("nothing", "first", "last", "before_last")
    )
    in_flight = np.asarray(units["embedding_in_flight"] * np.minimum(microbatches, pp))[..., None]
    ranks = np.arange(pp)
    ends = (first + in_flight) * (ranks == 0) + last * (ranks == pp - 1) + before_last * (ranks == pp - 2)
    return np.asarray(nothing + ends)


def rank_values(units: Mapping[str, Any], of: Contents, shape: Shape) -> Array:
    """A form on every rank of cuts (without what lies ahead), array (…, rank)."""
    dense, moe = of.dense_of_rank, of.moe_of_rank

    def each(name: str) -> Array:
        return np.asarray(units[name])[..., None]

    total = fixed(units, shape.pp, shape.microbatches) + each("dense") * dense + each("moe") * moe
    total = total + each("holds_moe") * (moe > 0) + each("holds_dense") * ((moe == 0) & (dense > 0))
    for name, stages in (("dense_in_flight", of.dense), ("moe_in_flight", of.moe)):
        if np.any(units[name]):
            of_ranks = [(stages[..., rank :: shape.pp], moments(shape, rank)) for rank in range(shape.pp)]
            worst = [(chunks @ then.T).max(axis=-1) for chunks, then in of_ranks]
            total = total + each(name) * np.stack(worst, axis=-1)
    return np.asarray(total)


def cost_at(row: Row, of: Contents, length: Any) -> Any:
    """Objective of cuts whose schedules have that length."""
    total: Any = np.zeros(of.dense.shape[:-1])
    for form, units in row.objective:
        value = length if form.name == PIPELINE else rank_values(units, of, row.shape).max(axis=-1)
        total = total + form.weight * (np.maximum(0.0, value) if form.at_least_zero else value)
    return total


def is_legal(row: Row, of: Contents) -> Array:
    """Whether cuts hold every limit."""
    legal = np.ones(of.dense.shape[:-1], dtype=bool)
    for form, units in row.limits:
        legal = legal & (rank_values(units, of, row.shape).max(axis=-1) <= form.budget * (1 + SLACK))
    return legal


def without_layers(path: Path, of: Items) -> Any:
    """What a path takes without the layers on it, s: transfers, embedding, output layer, prediction modules.

    Arrays broadcast.
    """
    total = path.transfers * of.delay + of.transfer * (path.forward.sum(axis=-1) + path.backward.sum(axis=-1))
    for stage, (there, back) in ((0, of.embedding), (-1, of.head), (-2, of.apart)):
        total = total + path.forward[..., stage] * there + path.backward[..., stage] * back
    return total


def on_path(path: Path, of: Items) -> tuple[Any, Array, Array]:
    """A path's length without layers, s, and what a dense or an MoE layer of each stage adds to it, (…, stage), s.

    ``path``: one, or many stacked.
    """
    dense, moe = (path.forward * there + path.backward * back for there, back in (of.dense, of.moe))
    return without_layers(path, of), dense, moe


def kinds(p: Instance) -> dict[str, int]:
    """Layers of each kind that the model has."""
    counts = {"dense": p.model.num_dense_layers, "moe": p.model.num_moe_layers}
    return {kind: n for kind, n in counts.items() if n}


def cheapest(p: Instance, units: Mapping[str, Any], suffix: str = "") -> Any:
    return np.min([units[kind + suffix] for kind in kinds(p)], axis=0)
