"""The values that each axis may take, and the layer cuts on offer: stated, finite, printed with every certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from parsolve.constraints.multi_token import may_be_apart
from parsolve.constraints.pipeline import LAYOUT_SINCE, WITHOUT_BLOCK, stages_without_layers
from parsolve.evaluation import active_rules
from parsolve.functions import Array
from parsolve.problem import Instance, Problem
from parsolve.specs import Recompute
from parsolve.specs.workload import MEGATRON_LIKE
from parsolve.splits import Split, Splits, balanced, classify, enumerate_splits, free, free_shape

MAX_MICRO_BATCH = 64
"""Largest micro-batch offered for an exact batch, sequences."""
MAX_TARGET_MICRO_BATCH = 16
"""Largest micro-batch offered when the batch itself may vary, sequences."""
MAX_CONTEXT_PARALLEL = 128
"""Largest context-parallel size offered."""


def divisors(n: int) -> tuple[int, ...]:
    """All divisors in ascending order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return tuple(sorted({*small, *(n // i for i in small)}))


def static_domains(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Axes whose values do not depend on the batch size, after the unary rules (pins among them)."""
    cluster, model = problem.cluster, problem.model
    world = divisors(cluster.num_gpus)
    fast = cluster.num_gpus if cluster.num_gpus <= cluster.gpus_per_domain else cluster.gpus_per_domain
    tensor = tuple(d for d in world if d <= fast)
    partly = problem.workload.framework not in WITHOUT_BLOCK and not problem.workload.splits_backward
    return {
        "tp": tensor,
        "cp": tuple(d for d in world if d <= min(MAX_CONTEXT_PARALLEL, problem.workload.seq_len)),
        "pp": tuple(d for d in world if d <= model.num_layers + stages_without_layers(problem)),
        "ep": tuple(d for d in world if d <= model.moe.num_experts) if model.moe else (1,),
        "etp": tensor,
        "dp": world,
        "edp": world,
        "shards": world,
        "zero": (0, 1, 2, 3),
        "vpp": tuple(range(1, model.num_layers + 1)),
        "recompute": tuple(int(r) for r in sorted(problem.workload.recompute) if partly or r != Recompute.BLOCK),
        "recompute_layers": tuple(range(model.num_layers)),
    }


def batch_domains(problem: Problem, gbs: int) -> dict[str, tuple[int, ...]]:
    """Micro-batch sizes and microbatch counts at one global batch size."""
    cap = MAX_TARGET_MICRO_BATCH if problem.per_token else MAX_MICRO_BATCH
    return {"mbs": tuple(d for d in divisors(gbs) if d <= cap), "grad_acc": divisors(gbs)}


def reachable_batches(problem: Problem) -> list[int]:
    """Global batch sizes worth solving, ascending: the exact one, the band's, or each smallest above a token target."""
    low, high = problem.gbs_target
    w = problem.workload
    if not problem.per_token:
        return [low]
    ranks = divisors(problem.cluster.num_gpus)
    units = sorted({b * d for b in range(1, MAX_TARGET_MICRO_BATCH + 1) for d in ranks})
    if w.gbs_tolerance is None:
        target = (w.gbs_tokens or 0) / w.seq_len
        return sorted({b for b in (math.ceil(target / unit - 1e-12) * unit for unit in units) if b <= high})
    return list(range(low, high + 1))


def restrict(p: Instance, domains: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The domains after every unary rule (heads, pins, …)."""
    result = {axis: np.array(values, dtype=np.int64) for axis, values in domains.items()}
    for rule in active_rules(p.problem):
        if len(rule.axes) == 1 and rule.axes[0] in result:
            axis = rule.axes[0]
            allowed = np.broadcast_to(np.asarray(rule(p, {axis: result[axis]}), dtype=bool), result[axis].shape)
            result[axis] = result[axis][allowed]
    return {axis: tuple(int(v) for v in values) for axis, values in result.items()}


def _grid_filling_dp(problem: Problem, gbs: int, domains: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The values of dp that fill the dense grid with some values of the other axes, and divide the batch.

    Of a band of batches most have none when other axes are pinned, and then no table is built.
    """
    world = problem.cluster.num_gpus
    others = {tp * cp * pp for tp in domains["tp"] for cp in domains["cp"] for pp in domains["pp"]}
    exact = "global_batch" not in problem.without
    return tuple(dp for dp in domains["dp"] if world // dp in others and not (exact and gbs % dp))


def takes_layouts(problem: Problem) -> bool:
    """The launcher spells any cut of the layers into stages, under this schedule."""
    layouts = problem.workload.framework in MEGATRON_LIKE and problem.megatron_core >= LAYOUT_SINCE
    return layouts and not problem.workload.splits_backward


def takes_any_cut(problem: Problem) -> bool:
    """Whether there can be several stages, and the launcher spells any cut of them: Megatron-Core's layout strings.

    It has no schedule that splits the backward pass, whose cuts cannot be relaxed, whatever rules are left out.
    """
    if not takes_layouts(problem):
        return False
    blank = problem.instance(1, Splits((), ()))
    return any(pp > 1 for pp in restrict(blank, {"pp": static_domains(problem)["pp"]})["pp"])


def split_list(problem: Problem, pp: tuple[int, ...], vpp: tuple[int, ...], any_cut: bool = False) -> Splits:
    """The layer cuts on offer for these pipeline shapes: those that can be listed, or with ``any_cut`` all at once."""
    workload = problem.workload
    cuts = "free" if any_cut else "listed"
    if any_cut and may_be_apart(problem):
        cuts = "free, modules apart as well"
    return _split_list(problem.model.layer_is_moe, workload.framework, workload.schedule, pp, vpp, cuts)


@lru_cache(maxsize=64)
def _split_list(
    layer_is_moe: tuple[bool, ...],
    framework: str,
    schedule: str,
    pp: tuple[int, ...],
    vpp: tuple[int, ...],
    cuts: str,
) -> Splits:
    layers = len(layer_is_moe)
    shapes = [(a, b) for a in pp for b in vpp if a * b <= layers + 2 and (b == 1 or a > 1)]
    if cuts != "listed":
        whole = balanced(layers, 1, 1)
        alone = [Split(whole, classify(whole, layers))] if (1, 1) in shapes else []
        several = [shape for shape in shapes if shape[0] > 1 and free_shape(layers, *shape)]
        with_apart = [shape for shape in shapes if shape[0] > 2 and free_shape(layers, *shape, mtp_apart=True)]
        apart = with_apart if cuts != "free" else []
        return Splits(layer_is_moe, [*alone, *(free(*s) for s in several), *(free(*s, mtp_apart=True) for s in apart)])
    uneven = framework in (*MEGATRON_LIKE, "torchtitan")
    return Splits(layer_is_moe, enumerate_splits(layers, shapes, uneven, schedule), schedule=schedule)


def with_recomputation(splits: Splits, chosen: Array, recomputed: Array) -> tuple[Splits, Array]:
    """Each of the ``chosen`` cuts with each number of ``recomputed`` layers that it allows, and which cut each is of.

    A chunk's first layers are recomputed; at least one layer of the fullest chunk is not.
    """
    found = [(i, n) for i in chosen.tolist() for n in recomputed.tolist() if 0 < n < splits.fullest[i]]
    cuts = [splits.cuts[i]._replace(recomputed=n) for i, n in found]
    of = Splits(splits.layer_is_moe, cuts, schedule=splits.schedule)
    return of, np.array([i for i, _ in found], dtype=np.int64)


def build(
    problem: Problem, gbs: int, batch: Mapping[str, tuple[int, ...]] | None = None, any_cut: bool = False
) -> tuple[Instance, dict[str, Array]]:
    """The instance at one batch size and the domain of every axis as ascending arrays.

    ``batch``: other domains than ``batch_domains`` has. ``any_cut``: with all cuts instead of those that can be listed,
    and without recompute=block. The list of cuts has none with recomputed layers; see ``with_recomputation``.
    """
    domains = {**static_domains(problem), **(batch or batch_domains(problem, gbs))}
    if any_cut:
        domains["recompute"] = tuple(kind for kind in domains["recompute"] if kind != Recompute.BLOCK)
    domains = restrict(problem.instance(gbs, Splits((), ())), domains)
    partly, others = (any((kind == Recompute.BLOCK) is so for kind in domains["recompute"]) for so in (True, False))
    domains["recompute_layers"] = tuple(n for n in domains["recompute_layers"] if (partly if n else others))
    domains["dp"] = _grid_filling_dp(problem, gbs, domains)
    splits = split_list(problem, domains["pp"], domains["vpp"], any_cut)
    p = problem.instance(gbs, splits)
    arrays = {axis: np.array(values, dtype=np.int64) for axis, values in domains.items()}
    arrays["split"] = np.arange(len(splits.cuts), dtype=np.int64)
    if splits.cuts:
        arrays["vpp"] = arrays["vpp"][np.isin(arrays["vpp"], splits.vpp)]
        arrays["pp"] = arrays["pp"][np.isin(arrays["pp"], splits.pp)]
    return p, arrays
