"""Step time and memory of many runs at once, with the very functions that the solver tabulates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsolve.constraints.memory import stage_memory
from parsolve.evaluation import PIPELINE
from parsolve.functions import STAGE, Array, Count, Part, Term
from parsolve.objectives.step_time import items, pipeline_length, step_time
from parsolve.problem import Instance, Problem
from parsolve.specs import Profile
from parsolve.splits import Layers, Split, Splits, classify
from parsolve.validation.runs import Run

AXES = ("tp", "pp", "cp", "ep", "etp", "dp", "edp", "zero", "mbs", "grad_acc", "vpp")
LINES_BY_METER = {
    "allocated": ("fragmentation", "outside"),
    "unknown": ("fragmentation", "outside"),
    "reserved": ("outside",),
}
"""Lines of the memory breakdown that a meter does not see; nvidia-smi (device) sees all. An unknown one is taken for
torch's allocated bytes, the figure that most training logs print."""


@dataclass(frozen=True)
class Prediction:
    """For each run: step time, s; memory of the worst stage, as the run's meter would read it, and usable, bytes."""

    step_s: Array
    memory_bytes: Array
    metered_bytes: Array
    usable_bytes: Array


class Batch:
    """Runs of one problem, evaluated together: axes are arrays with a value per run."""

    def __init__(self, runs: Sequence[Run], at: Array) -> None:
        self.runs, self.at = runs, at
        self.problem = runs[0].problem
        cuts: dict[Layers, None] = dict.fromkeys(run.config.layers_per_stage for run in runs)
        layers = self.problem.model.num_layers
        self.splits = Splits(self.problem.model.layer_is_moe, [Split(cut, classify(cut, layers)) for cut in cuts])
        axes: dict[str, Any] = {name: np.array([int(getattr(run.config, name)) for run in runs]) for name in AXES}
        axes["recompute"] = np.array([int(run.config.recompute) for run in runs])
        axes["shards"] = axes["dp"] * axes["cp"]
        axes["split"] = np.array([self.splits.index[run.config.cut] for run in runs])
        self.values = axes
        self.counts: dict[tuple[Count, int], Any] = {}
        self.stretch: Array | None = None
        self.gbs: Any = axes["dp"] * axes["mbs"] * axes["grad_acc"]

    def instance(self, problem: Problem) -> Instance:
        """The problem with a batch size per run."""
        return Instance(problem, self.gbs, self.splits)

    def count(self, p: Instance, part: Part, slot: int) -> Any:
        """How often a part is paid on a stage slot; it does not depend on the profile and is computed once."""
        if part.count is None:
            return 1.0
        key = (part.count, slot)
        if key not in self.counts:
            self.counts[key] = part.count(p, {**self.values, STAGE: slot})
        return self.counts[key]

    def step_s(self, p: Instance) -> Array:
        """Step time of each run: the sum of ``step_time``, every term computed once.

        The pipeline's bound is lengthened to its schedule's; by ``stretch`` where that is set.
        """
        known: dict[Term, Any] = {}

        def leaf(part: Part) -> Any:
            for term in filter(None, (part.term, part.weight)):
                if term not in known:
                    known[term] = term(p, self.values)
            value = known[part.term]
            return value * known[part.weight] if part.weight else value

        total: Any = np.zeros(len(self.runs))
        for quantity in step_time(p):
            leaves = [(part, part.sign * leaf(part)) for part in quantity.parts]
            worst: Any = None
            for slot in range(p.splits.slots):
                stage = sum(value * self.count(p, part, slot) for part, value in leaves)
                worst = stage if worst is None else np.maximum(worst, stage)
            if quantity.name == PIPELINE:
                worst = worst * (self.exact_stretch(p) if self.stretch is None else self.stretch)
            total = total + (np.maximum(worst, 0.0) if quantity.at_least_zero else worst)
        return np.asarray(total, dtype=float)

    def exact_stretch(self, p: Instance) -> Array:
        """How many times longer each run's schedule is than the bound of its pipeline."""
        stretch = np.ones(len(self.runs))
        pipelined = np.flatnonzero(self.values["pp"] > 1)
        if len(pipelined):
            bound = next(quantity for quantity in step_time(p) if quantity.name == PIPELINE).value(p, self.values)
            times = items(p, self.values)
            for i in pipelined.tolist():
                stretch[i] = pipeline_length(p, self.values, times, i) / bound[i]
        return stretch

    def memory(self, p: Instance) -> tuple[Array, Array]:
        """Worst stage's total, and the part that the run's meter sees on the stage that was read, bytes."""
        quantity = stage_memory(p)
        size = len(self.runs)
        leaves = [
            np.broadcast_to(np.asarray(part.leaf(p, self.values), dtype=float), (size,)) for part in quantity.parts
        ]
        hidden = np.array(
            [[part.line in LINES_BY_METER.get(run.meter, ()) for part in quantity.parts] for run in self.runs]
        )
        totals, seen = [], []
        for slot in range(p.splits.slots):
            amounts = np.stack(
                [
                    part.sign * leaf * self.count(p, part, slot)
                    for part, leaf in zip(quantity.parts, leaves, strict=True)
                ],
                axis=1,
            )
            totals.append(amounts.sum(axis=1))
            seen.append(np.where(hidden, 0.0, amounts).sum(axis=1))
        total, metered = np.stack(totals), np.stack(seen)
        rows = np.arange(size)
        last = p.splits.features["last"][self.values["split"]].argmax(axis=1)
        read_last = np.array([run.stage == "last" for run in self.runs])
        stage = np.where(read_last, last, metered.argmax(axis=0))
        return total.max(axis=0), metered[stage, rows]


def batches(runs: Sequence[Run]) -> list[Batch]:
    """Runs of the same problem together."""
    groups: dict[Hashable, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(run.key, []).append(index)
    return [Batch([runs[i] for i in at], np.array(at)) for at in groups.values()]


def predict(
    runs: Sequence[Run], profiles: dict[str, Profile] | None = None, *, prepared: list[Batch] | None = None
) -> Prediction:
    """Evaluate every run. ``profiles`` replaces profiles by name; ``prepared`` reuses ``batches(runs)``."""
    size = len(runs)
    step, memory, metered, usable = (np.zeros(size) for _ in range(4))
    for batch in prepared if prepared is not None else batches(runs):
        p = batch.instance(batch.problem)
        if profiles and batch.problem.profile.name in profiles:
            p.profile = profiles[batch.problem.profile.name]
        step[batch.at] = batch.step_s(p)
        memory[batch.at], metered[batch.at] = batch.memory(p)
        usable[batch.at] = p.usable_bytes
    return Prediction(step, memory, metered, usable)
