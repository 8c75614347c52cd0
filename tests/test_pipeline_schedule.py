"""The step-time tree and the in-flight counts against the event simulation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from simulate import simulate

from parsolve import Model, Problem, check, evaluate, load_cluster, load_model
from parsolve.objectives import counts
from parsolve.problem import Instance
from parsolve.splits import Split, Splits, balanced, classify


def instance(layers_per_stage: tuple[tuple[int, ...], ...]) -> Instance:
    layers = sum(map(sum, layers_per_stage))
    model = Model(
        name="m",
        num_layers=layers,
        hidden_size=1024,
        ffn_size=4096,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
    )
    problem = Problem(load_cluster("h100-sxm:8x8"), model, seq_len=1024, gbs=64)
    splits = Splits((False,) * layers, [Split(layers_per_stage, classify(layers_per_stage, layers))])
    return problem.instance(64, splits)


def tree_time(p: Instance, microbatches: int, layer: float, head: float) -> float:
    """The pipeline part of the tree for given layer and head times: the counts are the tree's own."""
    here = {"split": 0, "stage": np.arange(p.splits.slots)}
    pp = p.splits.pp[0]
    per_rank = counts.layers_of_all(p, here) / pp * microbatches * layer
    ahead = counts.layers_ahead(p, here) * layer
    last = counts.last_of_all(p, here) / pp * microbatches * head
    return float((per_rank + ahead + last).max())


@pytest.mark.parametrize("seed", range(60))
def test_even_stages_equal_the_simulation(seed: int) -> None:
    rng = random.Random(seed)
    pp = rng.choice([1, 2, 3, 4, 6, 8])
    vpp = rng.choice([1, 1, 2, 3]) if pp > 1 else 1
    m = pp * rng.choice([1, 2, 3, 5])
    per_chunk = rng.choice([1, 2, 3])
    p = instance(balanced(pp * vpp * per_chunk, pp, vpp))
    layer = rng.uniform(0.5, 2.0)
    forward = [[per_chunk * layer / 3] * vpp for _ in range(pp)]
    backward = [[2 * per_chunk * layer / 3] * vpp for _ in range(pp)]
    makespan, peak = simulate(forward, backward, m)
    assert tree_time(p, m, layer, 0.0) == pytest.approx(makespan, rel=1e-9)
    for rank in range(pp):
        slot = np.flatnonzero(p.splits.rank[0] == rank)
        if len(slot):
            held = counts.chunks_in_flight(p, 0, int(slot[0]), m)
            assert int(held) == peak[rank]


@pytest.mark.parametrize("seed", range(60))
def test_head_on_the_last_stage_equals_the_simulation(seed: int) -> None:
    """The output layer is paid once a microbatch, not once a step."""
    rng = random.Random(seed)
    pp, m = rng.choice([2, 3, 4, 8]), rng.choice([4, 8, 16])
    p = instance(balanced(2 * pp, pp, 1))
    layer, head = 1.0, rng.uniform(0.0, 2.0)
    forward = [[2 * layer / 3] for _ in range(pp)]
    backward = [[4 * layer / 3] for _ in range(pp)]
    forward[-1][0] += head / 3
    backward[-1][0] += 2 * head / 3
    makespan, _ = simulate(forward, backward, m)
    assert tree_time(p, m, layer, head) == pytest.approx(makespan, rel=1e-9)


@pytest.mark.parametrize("seed", range(120))
def test_uneven_stages_never_exceed_the_simulation(seed: int) -> None:
    rng = random.Random(seed)
    pp = rng.choice([2, 3, 4, 5, 8])
    vpp = rng.choice([1, 2, 3])
    m = pp * rng.choice([1, 2, 4])
    layers = tuple(tuple(rng.randint(1, 4) for _ in range(vpp)) for _ in range(pp))
    p = instance(layers)
    forward = [[n / 3 for n in rank] for rank in layers]
    backward = [[2 * n / 3 for n in rank] for rank in layers]
    makespan, _ = simulate(forward, backward, m)
    assert tree_time(p, m, 1.0, 0.0) <= makespan * (1 + 1e-9)


def test_first_stage_of_an_interleaved_pipeline_holds_71_chunks() -> None:
    """p = v = 8: p*v + p - 1 chunks. Source: Narayanan et al. 2021."""
    p = instance(balanced(64, 8, 8))
    assert int(counts.chunks_in_flight(p, 0, 0, 64)) == 71
    in_flight = counts.dense_layers_in_flight(p, {"split": 0, "stage": 0, "grad_acc": 64})
    assert int(in_flight) == 71  # one layer a chunk


def test_plain_1f1b_holds_pp_microbatches_on_the_first_stage() -> None:
    p = instance(balanced(16, 4, 1))
    held = [
        int(counts.dense_layers_in_flight(p, {"split": 0, "stage": s, "grad_acc": 8})) for s in range(p.splits.slots)
    ]
    assert held[0] == 4 * 4 and held[-1] == 4 * 1
    assert int(counts.dense_layers_in_flight(p, {"split": 0, "stage": 0, "grad_acc": 2})) == 2 * 4


def test_the_bubble_is_not_halved_by_1f1b() -> None:
    """(pp-1)/(m+pp-1) of the step: 46.7 % at pp = m = 8."""
    p = instance(balanced(8, 8, 1))
    total = tree_time(p, 8, 1.0, 0.0)
    assert (total - 8.0) / total == pytest.approx(0.4667, abs=1e-4)


def test_an_interleaved_round_that_is_not_full_is_timed_as_a_full_one() -> None:
    """Ranks would wait for each other for ever; the rules refuse the layout, and check still has to answer."""
    problem = Problem(load_cluster("h100-sxm:2x8"), load_model("llama2-7b"), seq_len=4096, gbs=20)
    layout = {"tp": 1, "pp": 4, "dp": 4, "vpp": 4, "mbs": 1}
    broken = check(problem, layout)
    assert [violation.rule for violation in broken] == ["microbatch_group"]
    whole = Problem(load_cluster("h100-sxm:2x8"), load_model("llama2-7b"), seq_len=4096, gbs=32)
    some, more = evaluate(problem, layout), evaluate(whole, layout)
    assert 0.9 * more.step_time_s < some.step_time_s <= more.step_time_s
