"""Random stage problems: a model, one configuration without its cut, and every cut of the stated domain, judged."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from oracle import all_cuts
from simulate import simulate

from parsolve import Problem
from parsolve.config import Config
from parsolve.evaluation import PIPELINE, active_limits, objective_rows, objective_tree
from parsolve.functions import Array
from parsolve.objectives.step_time import items, pass_times
from parsolve.problem import Instance
from parsolve.specs import Cluster, Gpu, Model, MoE, Network, Recompute, Workload
from parsolve.splits import Layers, Split, Splits, classify, from_model_order


def plain_model(layers: int, moe: MoE | None = None) -> Model:
    """A small model of alike layers, or with the MoE layers that are given."""
    return Model(
        name="m",
        num_layers=layers,
        hidden_size=1024,
        ffn_size=4096,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
        moe=moe,
    )


def random_model(rng: random.Random, layers: int) -> Model:
    """Dense, MoE, dense-first, or MoE with dense layers anywhere; the output layer small or large."""
    heads = rng.choice([4, 8, 16])
    kind = rng.choice(["dense", "dense", "moe", "dense first", "mixed"])
    dense: tuple[int, ...] = ()
    if kind == "dense first":
        dense = tuple(range(rng.randint(1, max(1, layers // 3))))
    elif kind == "mixed":
        dense = tuple(sorted(rng.sample(range(layers), rng.randint(1, layers - 1))))
    moe = MoE(
        num_experts=rng.choice([4, 8, 16]),
        top_k=rng.choice([1, 2, 4]),
        ffn_size=rng.choice([256, 1024, 4096]),
        shared_ffn_size=rng.choice([0, 1024]),
        dense_layers=dense,
    )
    return Model(
        name="test-model",
        num_layers=layers,
        hidden_size=heads * 128,
        ffn_size=rng.choice([2, 4, 8]) * heads * 128,
        num_heads=heads,
        num_kv_heads=rng.choice([2, heads]),
        head_dim=128,
        vocab_size=rng.choice([1000, 32000, 128256, 262144]),
        gated_mlp=rng.random() < 0.5,
        tied_embeddings=rng.random() < 0.3,
        moe=None if kind == "dense" else moe,
    )


def random_cluster(rng: random.Random, gpus: int) -> Cluster:
    """Hosts of eight GPUs with 10 TiB each: tests draw the memory afterwards."""
    return Cluster(
        name="test",
        gpu=Gpu(
            name="test-gpu",
            compute_capability=9.0,
            memory_bytes=10 * 2**40,
            memory_bandwidth=2e12,
            peak_flops={"bf16": rng.choice([100e12, 1000e12])},
        ),
        domains=gpus // 8,
        gpus_per_domain=8,
        domain_size=8,
        gpus_per_host=8,
        fast_link=Network(kind="nvlink", bandwidth=300e9),
        nic=Network(kind="ib", bandwidth=rng.choice([3e9, 12.5e9, 50e9])),
        nics_per_host=rng.choice([1, 8]),
    )


GOALS = (*[((1.0, "step_time"),)] * 6, ((1.0, "memory"),), ((1.0, "step_time"), (1e-12, "memory")))
LARGEST = 1_000
"""Cuts of a problem that brute force looks at."""


@dataclass(frozen=True)
class StageProblem:
    """One configuration (``values``: an array with one value an axis) and all its cuts, the instance's splits."""

    p: Instance
    values: dict[str, Array]
    cuts: list[Layers]

    def of_all(self) -> dict[str, Array]:
        """The configuration with every cut, a row each."""
        size = len(self.cuts)
        rows = {axis: np.broadcast_to(column, (size,)) for axis, column in self.values.items()}
        return {**rows, "split": np.arange(size)}

    def legal(self) -> Array:
        """(cut,) whether it holds every limit."""
        rows, result = self.of_all(), np.ones(len(self.cuts), dtype=bool)
        for limit in active_limits(self.p.problem):
            result &= np.broadcast_to(np.asarray(limit.holds(self.p, rows)), result.shape)
        return result

    def bounds(self) -> Array:
        """(cut,) at most the objective."""
        return objective_rows(self.p, self.of_all()).bound

    def config(self, i: int) -> Config:
        """The configuration with one of the cuts."""
        names = ("tp", "pp", "cp", "ep", "etp", "vpp", "zero", "mbs", "grad_acc", "dp", "edp")
        return Config(
            **{name: int(self.values[name][0]) for name in names},
            recompute=Recompute(int(self.values["recompute"][0])),
            layers_per_stage=self.cuts[i],
            mtp_apart=self.p.splits.cuts[i].mtp_apart,
            sequence_parallel=bool(self.p.sequence_parallel and self.values["tp"][0] > 1),
        )

    def costs(self, chosen: Array | None = None) -> Array:
        """(cut,) the objective of some cuts, or all, by the event simulation; inf where a limit is broken."""
        chosen = np.arange(len(self.cuts)) if chosen is None else chosen
        rows = {axis: column[chosen] for axis, column in self.of_all().items()}
        others = np.zeros(len(chosen))
        weight = 0.0
        for factor, quantity in objective_tree(self.p):
            if quantity.name == PIPELINE:
                weight = factor
            else:
                others = others + factor * quantity.value(self.p, rows)
        legal = self.legal()[chosen]
        if weight:
            of = items(self.p, self.values).row(0)
            for i in np.flatnonzero(legal).tolist():
                others[i] += weight * self.simulated(of, int(chosen[i]))
        return np.where(legal, others, np.inf)

    def simulated(self, of: Any, i: int) -> float:
        """Length of the schedule of one cut."""
        pp, m = int(self.values["pp"][0]), int(self.values["grad_acc"][0])
        dense, moe = (layers.T.ravel() for layers in self.p.splits.contents[i])
        forward, backward, delay, _ = pass_times(of, dense, moe)
        there, back = (from_model_order(times.tolist(), pp) for times in (forward, backward))  # type: ignore[arg-type]
        return simulate(there, back, m, delay=delay).makespan

    def best(self) -> tuple[float, Layers | None]:
        """The cheapest legal cut: exact values, in the order of bounds that other tests show to be admissible."""
        legal = self.legal()
        rows = objective_rows(self.p, self.of_all())
        best, found = np.inf, None
        for i in np.flatnonzero(legal)[np.argsort(rows.bound[legal], kind="stable")].tolist():
            if rows.bound[i] >= best:
                break
            value = rows.exact(i)
            if value < best:
                best, found = value, self.cuts[i]
        return best, found


def with_cuts(problem: Problem, gbs: int, cuts: list[Layers], mtp_apart: bool) -> Instance:
    """The instance whose list of splits are these cuts."""
    layers = problem.model.num_layers
    found = [Split(cut, classify(cut, layers), mtp_apart=mtp_apart) for cut in cuts]
    return problem.instance(gbs, Splits(problem.model.layer_is_moe, found))


def stage_problem(seed: int, largest: int = LARGEST) -> StageProblem:
    """At most 16 layers on at most 4 stages of at most 2 chunks; half of them with memory for some cuts only."""
    rng = random.Random(seed)
    while True:
        pp, vpp = rng.choice([2, 2, 3, 4, 4]), rng.choice([1, 1, 2])
        layers = rng.randint(max(2, pp * vpp - 2), 16)
        cuts = all_cuts(layers, pp, vpp)
        if 1 < len(cuts) <= largest:
            break
    model = random_model(rng, layers)
    tp, cp, dp = rng.choice([1, 2, 4]), rng.choice([1, 1, 2]), rng.choice([1, 2, 4]) * 8
    world = tp * cp * dp * pp
    ep = rng.choice([1, 2, 4]) if model.moe else 1
    etp = rng.choice([1, tp])
    m = pp * rng.randint(1, 5) if vpp > 1 else rng.randint(1, 16)
    mbs = rng.choice([1, 2, 4])
    problem = Problem(
        random_cluster(rng, world),
        model,
        Workload(
            seq_len=rng.choice([512, 2048, 8192]),
            framework=rng.choice(["megatron", "nemo"]),
            gbs=dp * m * mbs,
            shard_group=rng.choice([None, None, 2]),
            mtp_layers=random.Random(f"prediction {seed}").choice([0, 0, 1, 2]),
        ),
        goal=rng.choice(GOALS),
    )
    axes = {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": ep,
        "etp": etp,
        "vpp": vpp,
        "dp": dp,
        "edp": world // (ep * etp * pp),
        "zero": rng.choice([0, 1, 2, 3]),
        "recompute": int(rng.choice(list(Recompute))),
        "mbs": mbs,
        "grad_acc": m,
        "shards": dp * cp,
        "split": 0,
    }
    apart = problem.mtp_layers > 0 and pp > 2 and random.Random(f"apart {seed}").random() < 0.6
    cuts = all_cuts(layers, pp, vpp, apart)
    p = with_cuts(problem, dp * m * mbs, cuts, apart)
    found = StageProblem(p, {axis: np.array([value]) for axis, value in axes.items()}, cuts)
    if rng.random() < 0.5:
        return found
    memory = active_limits(problem)[0].quantity(p).value(p, found.of_all())
    reserve = problem.workload.memory_reserve
    tight = float(np.quantile(memory, rng.random() ** 2)) * (1 + 1e-6) + reserve
    gpu = problem.cluster.gpu.model_copy(update={"memory_bytes": int(tight)})
    cluster = problem.cluster.model_copy(update={"gpu": gpu})
    return replace(found, p=problem.with_(cluster=cluster).instance(p.gbs, p.splits))
