"""One configuration in floating point: what it costs, what it holds, which rules it breaks.

The only evaluator: solver results, ``check`` and tests all pass through here, and it calls the same functions that the
solver tabulates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsolve.config import Config
from parsolve.constraints import LIMITS, RULES, WARNINGS
from parsolve.constraints.memory import stage_memory
from parsolve.functions import Array, Function, Limit, Part, Points, Rule, StageMax
from parsolve.objectives.network import inside_domain
from parsolve.objectives.schedule_length import Timeline, timeline
from parsolve.objectives.step_time import HIDDEN, Items, items, pipeline_length, schedule_of, step_time
from parsolve.problem import Instance, Problem
from parsolve.splits import Layers, Split, Splits, classify

ROUNDING = 1e-13
PIPELINE = "pipeline"
"""The quantity of the step time that a schedule makes longer than its bound."""


@dataclass(frozen=True)
class Violation:
    """A broken rule or limit: its name, a message with the numbers, the values of its axes."""

    rule: str
    message: str
    values: dict[str, Any]


@dataclass(frozen=True)
class StageMemory:
    """Memory of one pipeline rank by part, bytes."""

    rank: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    def to_json(self, limit: float) -> dict[str, int]:
        """``memory_bytes`` of the JSON output: whole bytes; the parts add up to ``total``."""
        parts = {name: round(amount) for name, amount in self.parts.items() if amount or name in _ALWAYS}
        return {"total": sum(parts.values()), "limit": round(limit), **parts}


@dataclass(frozen=True)
class Estimate:
    """What one configuration costs. Times in s, memory in bytes.

    ``terms_s`` adds up to ``step_time_s``; ``hidden_s`` runs behind compute and is not part of it.
    """

    step_time_s: float
    time_per_token_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    mfu_causal: float
    bubble_fraction: float
    terms_s: dict[str, float]
    hidden_s: dict[str, float]
    memory_bytes: dict[str, int]
    worst_stage: int

    @property
    def limited_by(self) -> str:
        """The largest term's name."""
        return max(self.terms_s, key=lambda name: self.terms_s[name])

    def to_json(self) -> dict[str, Any]:
        """The ``estimate`` object of the JSON output."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def active_rules(problem: Problem) -> tuple[Rule, ...]:
    """Built-in rules that apply to the workload and are not left out, then the user's own."""
    built_in = tuple(
        r for r in RULES if r.applies(problem.workload) and (r.role == "grid" or r.name not in problem.without)
    )
    return (*built_in, *problem.rules)


def active_limits(problem: Problem) -> tuple[Limit, ...]:
    """Built-in limits that are not left out, then the user's own."""
    return (*(x for x in LIMITS if x.name not in problem.without), *problem.limits)


def instance_for(
    problem: Problem,
    layers: Layers,
    gbs: int,
    every_rank: bool = False,
    recompute_layers: int = 0,
    mtp_apart: bool = False,
) -> Instance:
    """The instance at one batch size that knows a single cut; see ``Splits`` for ``every_rank``."""
    schedule = problem.workload.schedule
    cut = Split(layers, classify(layers, problem.model.num_layers, schedule), recompute_layers, mtp_apart)
    return problem.instance(gbs, Splits(problem.model.layer_is_moe, [cut], every_rank, schedule))


def instance_of(problem: Problem, config: Config, every_rank: bool = False, gbs: int | None = None) -> Instance:
    """The instance that knows the cut of one configuration, at its batch size unless another is given."""
    layers, recomputed, mtp_apart = config.cut
    return instance_for(problem, layers, gbs or config.gbs, every_rank, recomputed, mtp_apart)


def axis_values(p: Instance, config: Config) -> dict[str, int]:
    """The configuration's axes with ``split`` as the index of its cut in ``p``."""
    return {**config.axes(), "split": p.splits.index[config.cut]}


def time_tree(p: Instance) -> tuple[StageMax, ...]:
    """The summands of the step time, built once an instance."""
    if "time" not in p.memo:
        p.memo["time"] = step_time(p)
    tree: tuple[StageMax, ...] = p.memo["time"]
    return tree


def objective_tree(p: Instance) -> list[tuple[float, StageMax]]:
    """What is minimised: worst-stage sums with their weights.

    Step time counts in s, or in s/token when batches may differ; memory in bytes.
    """
    per_token = p.gbs * p.seq_len if p.problem.per_token else 1
    tree: list[tuple[float, StageMax]] = []
    for weight, name in p.problem.goal:
        if name == "memory":
            tree.append((weight, memory_tree(p)))
        else:
            tree += [(weight / per_token, quantity) for quantity in time_tree(p)]
    return tree


def memory_tree(p: Instance) -> StageMax:
    """The memory of a stage, built once an instance."""
    if "memory" not in p.memo:
        p.memo["memory"] = stage_memory(p)
    tree: StageMax = p.memo["memory"]
    return tree


def model_flops_per_token(p: Instance) -> tuple[float, float]:
    """Forward and backward FLOPs of a token, full-attention (PaLM) and causal convention; recomputation not counted.

    6 * (active parameters in matrix products, output layer included, embedding look-up not) + 12*L*a*k*s. Prediction
    modules count where they are trained, each with its layer, its projection and its pass through the output layer, as
    Megatron-LM counts them.
    Source: Chowdhery et al. 2022, appendix B; Megatron-LM training.py, num_floating_point_operations.
    """
    model = p.model
    extra = p.mtp_layers
    moe_layers = model.num_moe_layers + extra * model.layer_is_moe[-1]
    layers = model.num_layers + extra
    matrices = layers * model.attention_matrix_params + (1 + extra) * model.vocab_size * model.embedding_width
    matrices += (layers - moe_layers) * model.mlp_matrix_params(model.ffn_size) + extra * 2 * model.hidden_size**2
    if model.moe:
        active = model.moe.top_k * model.mlp_matrix_params(model.moe.ffn_size)
        shared = model.mlp_matrix_params(model.moe.shared_ffn_size)
        matrices += moe_layers * (active + shared + model.moe.num_experts * model.hidden_size)
    heads = model.num_heads * (model.qk_head_size + model.v_head_size) / 2
    attention = 12.0 * layers * heads * p.seq_len
    return 6.0 * matrices + attention, 6.0 * matrices + attention / 2


class _Point:
    """One configuration under evaluation."""

    def __init__(self, p: Instance, values: Mapping[str, Any]) -> None:
        self.p, self.values = p, Points(p, values)

    def of(self, function: Function) -> float:
        """A term or weight."""
        return float(function(self.p, self.values))

    def count(self, part: Part) -> Array:
        """How often a part is paid on each stage slot."""
        value = part.count(self.p, self.values.at_stages) if part.count else 1.0
        return np.broadcast_to(np.asarray(value, dtype=float), (self.p.splits.slots,))

    def amounts(self, quantity: StageMax) -> Array:
        """(part, slot): the signed summands of every stage."""
        rows = []
        for part in quantity.parts:
            leaf = self.of(part.term) * (self.of(part.weight) if part.weight else 1.0)
            rows.append(part.sign * leaf * self.count(part))
        return np.stack(rows)


def _lines(quantity: StageMax, amounts: Array) -> dict[str, float]:
    """One stage's amounts added up by the lines of the breakdown."""
    lines: dict[str, float] = {}
    for part, amount in zip(quantity.parts, amounts.tolist(), strict=True):
        lines[part.line] = lines.get(part.line, 0.0) + amount
    return lines


def _times(point: _Point) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed and hidden time by line, each quantity on its own critical stage.

    What the schedule takes beyond the bound of its critical stage is waiting, so bubble.
    """
    terms: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for quantity in time_tree(point.p):
        amounts = point.amounts(quantity)
        slot = int(np.argmax(amounts.sum(axis=0)))
        here = amounts[:, slot]
        if quantity.at_least_zero:
            exposed = max(0.0, float(here.sum()))
            lines = {quantity.name: exposed}
            behind = {quantity.name: float(here[here > 0].sum()) - exposed}
        else:
            lines = _lines(quantity, here)
            behind = {}
            for part in quantity.parts:
                companion = HIDDEN.get(part.term)
                if companion is not None and part.weight is not None:
                    amount = point.of(companion) * point.of(part.weight) * float(point.count(part)[slot])
                    behind[part.line] = behind.get(part.line, 0.0) + amount
        if quantity.name == PIPELINE and point.values["pp"] > 1:
            rows = {axis: np.array([value]) for axis, value in point.values.items()}
            bound = float(here.sum())
            waiting = pipeline_length(point.p, rows, items(point.p, rows), 0) - bound
            waiting = waiting if abs(waiting) > ROUNDING * bound else 0.0
            lines["bubble"] = lines.get("bubble", 0.0) + waiting
        for total, added in ((terms, lines), (hidden, behind)):
            for line, amount in added.items():
                total[line] = total.get(line, 0.0) + amount
    return terms, hidden


def _memories(point: _Point) -> list[StageMemory]:
    quantity = memory_tree(point.p)
    amounts = point.amounts(quantity)
    ranks = point.p.splits.rank[point.values["split"]].tolist()
    rows: dict[int, StageMemory] = {}
    for slot, rank in enumerate(ranks):
        here = StageMemory(rank, _lines(quantity, amounts[:, slot]))
        if rank not in rows or here.total > rows[rank].total:
            rows[rank] = here
    return [rows[rank] for rank in sorted(rows)]


def stage_memories(p: Instance, config: Config) -> list[StageMemory]:
    """Memory by part of each pipeline rank that the instance's splits have a slot for, in rank order."""
    return _memories(_Point(p, axis_values(p, config)))


def estimate(p: Instance, config: Config) -> Estimate:
    """Step time, throughput and memory of a configuration of ``p``, legal or not."""
    point = _Point(p, axis_values(p, config))
    terms, hidden = _times(point)
    step = sum(terms.values())
    tokens = p.gbs * p.seq_len
    full, causal = model_flops_per_token(p)
    per_gpu = tokens / step / p.world
    peak = p.matmul_peak
    stages = _memories(point)
    worst = max(stages, key=lambda stage: stage.total)
    return Estimate(
        step_time_s=step,
        time_per_token_s=step / tokens,
        tokens_per_s_per_gpu=per_gpu,
        model_tflops_per_gpu=full * per_gpu / 1e12,
        mfu=full * per_gpu / peak,
        mfu_causal=causal * per_gpu / peak,
        bubble_fraction=terms.get("bubble", 0.0) / step,
        terms_s=terms,
        hidden_s={name: amount for name, amount in hidden.items() if amount},
        memory_bytes=worst.to_json(p.usable_bytes),
        worst_stage=worst.rank,
    )


_ALWAYS = {"parameters", "gradients", "optimizer", "activations", "logits", "fragmentation", "outside"}


class Rows:
    """Many configurations of one instance, ``values[axis]`` an array with a value each.

    ``bound`` is never above the value that is minimised, and equal to it without a pipeline.
    """

    def __init__(self, p: Instance, values: Mapping[str, Array], tree: list[tuple[float, StageMax]]) -> None:
        self.p, self.values = p, Points.of(p, values)
        size = len(values["pp"])
        self.fixed, self.pipeline, self.weight = np.zeros(size), np.zeros(size), 0.0
        for weight, quantity in tree:
            amount = np.broadcast_to(np.asarray(quantity.value(p, self.values), dtype=float), (size,))
            if quantity.name == PIPELINE:
                self.pipeline, self.weight = weight * amount, weight
            else:
                self.fixed = self.fixed + weight * amount
        self.bound: Array = self.fixed + self.pipeline
        self._items: Items | None = None

    def exact(self, i: int) -> float:
        """The value that is minimised for row ``i``, whose split is a concrete cut: the pipeline by its schedule."""
        if not self.weight or self.values["pp"][i] == 1:
            return float(self.bound[i])
        if self._items is None:
            self._items = items(self.p, self.values)
        return float(self.fixed[i] + self.weight * pipeline_length(self.p, self.values, self._items, i))


def objective_rows(p: Instance, values: Mapping[str, Array]) -> Rows:
    """The objective of many configurations."""
    return Rows(p, values, objective_tree(p))


def objective_value(p: Instance, config: Config) -> float:
    """The value that is minimised, for one configuration."""
    return objective_rows(p, _columns(p, config)).exact(0)


def total_time(p: Instance, config: Config) -> float:
    """Step time of one configuration, s."""
    return Rows(p, _columns(p, config), [(1.0, quantity) for quantity in time_tree(p)]).exact(0)


def _columns(p: Instance, config: Config) -> dict[str, Array]:
    return {axis: np.array([value]) for axis, value in axis_values(p, config).items()}


def pipeline_timeline(p: Instance, config: Config) -> Timeline:
    """When every forward and backward pass of one step starts and ends, s; the last end is the pipeline's time."""
    values = _columns(p, config)
    return timeline(*schedule_of(p, values, items(p, values), 0))


def violations(p: Instance, config: Config) -> list[Violation]:
    """Every rule and limit that the configuration breaks, in the order of the rule list."""
    values = Points(p, axis_values(p, config))
    found = []
    for rule in active_rules(p.problem):
        if not bool(np.all(rule(p, values))):
            shown = {axis: int(values[axis]) for axis in rule.axes if axis != "split"}
            found.append(Violation(rule.name, rule.explain(p, values), shown))
    for limit in active_limits(p.problem):
        if not bool(limit.holds(p, values)):
            quantity = limit.quantity(p)
            shown_limit = {"value": float(quantity.value(p, values)), "budget": float(limit.budget(p))}
            found.append(Violation(limit.name, limit.explain(p, values), shown_limit))
    return found


def warnings_for(p: Instance, config: Config) -> list[Violation]:
    """Warnings that apply to a configuration."""
    values = axis_values(p, config)
    return [
        Violation(w.name, w.explain(p, values), {axis: int(values[axis]) for axis in w.axes if axis != "split"})
        for w in WARNINGS
        if bool(np.all(w(p, values)))
    ]


def placement(p: Instance, config: Config) -> dict[str, str]:
    """The network level on which each axis communicates: the fast link's kind, ``nic``, or ``none`` (size 1)."""
    stride = {
        "tp": (config.tp, 1),
        "cp": (config.cp, config.tp),
        "ep": (config.ep, config.etp),
        "dp": (config.dp * config.cp, config.tp),
        "pp": (config.pp, p.world // config.pp),
    }
    levels = {}
    for axis, (size, step) in stride.items():
        fast = bool(inside_domain(p, np.asarray(size), np.asarray(step)))
        alone = getattr(config, axis) == 1
        levels[axis] = "none" if alone else (p.cluster.fast_link.kind if fast else "nic")
    return levels
