"""The schedule's length, its paths and bounds, and the in-flight counts against the event simulation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from cut_problems import plain_model
from simulate import simulate

from parsolve import Problem, check, evaluate, load_cluster
from parsolve.evaluation import PIPELINE, instance_for, time_tree
from parsolve.functions import Array
from parsolve.objectives import counts, schedule_length
from parsolve.objectives.schedule import Shape, held, shape_of
from parsolve.objectives.schedule_length import makespan, timeline
from parsolve.objectives.schedule_paths import Path, critical_path, long_paths, plain_paths
from parsolve.objectives.step_time import items, pipeline_length
from parsolve.problem import Instance
from parsolve.specs import MoE, Recompute
from parsolve.splits import Layers, Split, Splits, balanced, classify, from_model_order


def instance(layers_per_stage: Layers, is_moe: tuple[bool, ...] | None = None) -> Instance:
    """A pipeline of layers of one kind, or of two."""
    layers = sum(map(sum, layers_per_stage))
    is_moe = is_moe or (False,) * layers
    dense = tuple(i for i, kind in enumerate(is_moe) if not kind)
    moe = MoE(num_experts=8, top_k=2, ffn_size=512, dense_layers=dense) if any(is_moe) else None
    problem = Problem(load_cluster("h100-sxm:8x8"), plain_model(layers, moe), seq_len=1024, gbs=64)
    splits = Splits(is_moe, [Split(layers_per_stage, classify(layers_per_stage, layers))])
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
    simulated = simulate(forward, backward, m)
    assert tree_time(p, m, layer, 0.0) == pytest.approx(simulated.makespan, rel=1e-9)
    for slot, rank in enumerate(p.splits.rank[0].tolist()):
        in_flight = counts.dense_layers_in_flight(p, {"split": 0, "stage": slot, "grad_acc": m})
        assert int(in_flight) == per_chunk * simulated.passes[rank]


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
    assert tree_time(p, m, layer, head) == pytest.approx(simulate(forward, backward, m).makespan, rel=1e-9)


def random_shape(rng: random.Random) -> Shape:
    """1F1B, interleaved or GPipe; a plain pipeline may have any number of microbatches."""
    pp, vpp = rng.choice([1, 2, 3, 4, 5, 8]), rng.choice([1, 1, 2, 3, 4])
    vpp = vpp if pp > 1 else 1
    m = pp * rng.randint(1, 6) if vpp > 1 else rng.randint(1, 24)
    return Shape(pp, vpp, m, rng.choice(["1f1b", "1f1b", "gpipe"]))


def random_times(rng: random.Random, shape: Shape) -> tuple[Array, Array, float]:
    """Forward and backward times of every stage, some near zero, and a delay, none or as long as many passes."""
    size = shape.pp * shape.vpp
    forward, backward = (
        np.array([rng.choice([0.01, 1.0, 1.0, 3.0]) * rng.random() for _ in range(size)]) for _ in "12"
    )
    return forward, backward, rng.choice([0.0, 0.05, 0.5, 5.0]) * rng.random()


def by_rank(times: Array, pp: int) -> Any:
    return from_model_order(times.tolist(), pp)


def simulated_length(shape: Shape, forward: Array, backward: Array, delay: float) -> float:
    there, back = by_rank(forward, shape.pp), by_rank(backward, shape.pp)
    return simulate(there, back, shape.microbatches, delay=delay, kind=shape.kind).makespan


@pytest.mark.parametrize("block", range(10))
def test_length_equals_the_simulation(block: int) -> None:
    """300 pipelines of unequal chunks with delays."""
    for seed in range(30 * block, 30 * block + 30):
        rng = random.Random(seed)
        shape = random_shape(rng)
        forward, backward, delay = random_times(rng, shape)
        expected = simulated_length(shape, forward, backward, delay)
        assert makespan(shape, forward, backward, delay) == pytest.approx(expected, rel=1e-9), (seed, shape)


@pytest.mark.parametrize("block", range(10))
def test_length_of_long_schedules_equals_the_simulation(block: int) -> None:
    """Long enough to be put together from a shorter one, or from a longer one where the ranks get in step late."""
    for seed in range(10 * block, 10 * block + 10):
        rng = random.Random(5000 + seed)
        pp, vpp = rng.choice([2, 3, 4, 8]), rng.choice([1, 2, 3])
        m = pp * rng.randint(16, 50) + (rng.randrange(pp) if vpp == 1 else 0)
        shape = Shape(pp, vpp, m)
        forward, backward, delay = random_times(rng, shape)
        if seed % 2:  # stages alike but for one
            forward[1:], backward[1:] = forward[0] + 0.5, backward[0] + 1.0
        expected = simulated_length(shape, forward, backward, delay)
        assert makespan(shape, forward, backward, delay) == pytest.approx(expected, rel=1e-12), (seed, shape)
        whole = schedule_length._one_by_one(shape, np.concatenate((forward, backward)), delay)
        assert timeline(shape, forward, backward, delay).end.max() == pytest.approx(whole.max(), rel=1e-12)


def test_a_batch_of_a_million_is_no_longer_to_compute() -> None:
    """By differences: each group of microbatches takes the same, and a path likewise."""
    forward, backward = np.full(8, 1.0), np.full(8, 2.0)
    sizes = [2**20, 2**20 + 2, 2**20 + 4]
    lengths = [makespan(Shape(2, 4, m), forward, backward, 0.1) for m in sizes]
    assert lengths[2] - lengths[1] == pytest.approx(lengths[1] - lengths[0]) == pytest.approx(24.0)
    (path,) = long_paths(Shape(2, 4, sizes[0]), forward[:, None], backward[:, None], 0.1)
    assert path.length(forward, backward, 0.1) == pytest.approx(lengths[0], rel=1e-9)


def test_a_long_schedule_repeats_a_short_one_only_where_its_ranks_are_in_step() -> None:
    """Behind a faster stage the others' order settles on a period of its own."""
    shape = Shape(4, 1, 400)
    alike = np.array([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    never = np.array([1.0, 1.0, 1.0, 0.9, 2.0, 2.0, 2.0, 2.0])
    for times, in_step in ((alike, True), (never, False)):
        whole = schedule_length._one_by_one(shape, times, 0.1)
        found = schedule_length._repeated(shape, times, 0.1)
        assert (found is not None) == in_step
        assert schedule_length._ends_of_one(shape, times, 0.1) == pytest.approx(whole, rel=1e-12)


def path_is_bound(shape: Shape, path: Path, rng: random.Random) -> None:
    """Whatever the times, the schedule is at least as long as the path."""
    for _ in range(3):
        other = random_times(rng, shape)
        assert path.length(*other) <= makespan(shape, *other) * (1 + 1e-9), shape


@pytest.mark.parametrize("block", range(10))
def test_paths_are_bounds_for_all_times(block: int) -> None:
    """The critical path is as long as the schedule; it and the paths found on fewer microbatches bound all others."""
    for seed in range(30 * block, 30 * block + 30):
        rng = random.Random(1000 + seed)
        shape = random_shape(rng)
        if seed % 2:  # long enough for the repeated part to be put in
            m = shape.pp * rng.randint(7, 20) + (rng.randrange(shape.pp) if shape.vpp == 1 else 0)
            shape = shape._replace(microbatches=m)
        times = random_times(rng, shape)
        length, path = critical_path(shape, *times)
        assert length == pytest.approx(makespan(shape, *times), rel=1e-9)
        assert path.length(*times) == pytest.approx(length, rel=1e-9)
        path_is_bound(shape, path, rng)
        cases = [random_times(rng, shape)[:2] for _ in range(3)]
        forward, backward = (np.stack([case[i] for case in cases], axis=1) for i in (0, 1))
        for case, longish in zip(cases, long_paths(shape, forward, backward, times[2]), strict=True):
            assert longish.length(*case, times[2]) <= makespan(shape, *case, times[2]) * (1 + 1e-9)
            path_is_bound(shape, longish, rng)


def random_cut(rng: random.Random, pp: int, vpp: int, least: int = 0) -> Layers:
    """Chunks of ``least`` to five layers, at least one in all."""
    sizes = [rng.randint(least, 5) for _ in range(pp * vpp)]
    return from_model_order(sizes if any(sizes) else [1, *sizes[1:]], pp)


@pytest.mark.parametrize("block", range(10))
def test_layers_in_flight_equal_the_simulation(block: int) -> None:
    """300 pipelines of unequal chunks, dense, MoE or both; each kind at its own worst moment."""
    for seed in range(30 * block, 30 * block + 30):
        rng = random.Random(2000 + seed)
        shape = random_shape(rng)._replace(kind="1f1b")
        pp, vpp, m, _ = shape
        cut = random_cut(rng, pp, vpp)
        layers = sum(map(sum, cut))
        first = rng.choice([0, layers, rng.randint(0, layers)])
        p = instance(cut, tuple(i >= first for i in range(layers)))
        ones = [[1.0] * vpp for _ in range(pp)]
        for count, contents in zip(
            (counts.dense_layers_in_flight, counts.moe_layers_in_flight), p.splits.contents[0], strict=True
        ):
            simulated = simulate(ones, ones, m, layers=contents.tolist())
            for slot, rank in enumerate(p.splits.rank[0].tolist()):
                at = {"split": np.array([0]), "stage": np.array([slot]), "grad_acc": np.array([m])}
                assert int(count(p, at)[0]) == simulated.layers[rank], (seed, shape, cut)
        depth = shape._replace(microbatches=m)
        everything = simulate(ones, ones, m, layers=cut)
        for rank in range(pp):
            assert int((held(depth, rank) @ np.array(cut[rank])).max()) == everything.layers[rank]


@pytest.mark.parametrize("seed", range(120))
def test_uneven_stages_never_exceed_the_simulation(seed: int) -> None:
    rng = random.Random(seed)
    pp = rng.choice([2, 3, 4, 5, 8])
    vpp = rng.choice([1, 2, 3])
    m = pp * rng.choice([1, 2, 4])
    layers = random_cut(rng, pp, vpp, 1)
    p = instance(layers)
    forward = [[n / 3 for n in rank] for rank in layers]
    backward = [[2 * n / 3 for n in rank] for rank in layers]
    assert tree_time(p, m, 1.0, 0.0) <= simulate(forward, backward, m).makespan * (1 + 1e-9)


MODELS = ("llama3.1-8b", "gpt2-1.5b", "mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2", "gpt-oss-120b")


def random_composition(rng: random.Random, layers: int, stages: int) -> list[int]:
    """Any numbers of layers that add up, the first and the last chunk perhaps empty."""
    inner = [1] * stages
    inner[0] = inner[-1] = 0
    for _ in range(layers - sum(inner)):
        inner[rng.randrange(stages)] += 1
    return inner


@pytest.mark.parametrize("model", MODELS)
def test_the_tree_never_exceeds_the_schedule(model: str) -> None:
    """Real problems, dense, MoE and dense first, with embedding, output layer and transfers, under random cuts."""
    rng = random.Random(model)
    longer = 0
    for _ in range(40):
        pp = rng.choice([2, 4, 8])
        tp, dp = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4])
        problem = Problem(
            f"h100-sxm:{pp * tp * dp}x8",
            model,
            seq_len=rng.choice([512, 1024]),
            gbs=(gbs := 8 * dp * pp * rng.randint(1, 3)),
            framework=rng.choice(["megatron", "nemo", "torchtitan"]),
        )
        vpp = rng.choice([1, 2, 3])
        cut = from_model_order(random_composition(rng, problem.model.num_layers, pp * vpp), pp)
        p = instance_for(problem, cut, gbs)
        axes = {
            "tp": tp,
            "cp": 1,
            "pp": pp,
            "ep": 1,
            "etp": tp,
            "dp": 8 * dp,
            "edp": 8 * dp,
            "vpp": vpp,
            "zero": 1,
            "mbs": 1,
            "grad_acc": gbs // dp // 8,
            "recompute": int(rng.choice(list(Recompute))),
            "split": 0,
            "shards": 8 * dp,
        }
        values = {axis: np.array([value]) for axis, value in axes.items()}
        tree = next(quantity for quantity in time_tree(p) if quantity.name == PIPELINE)
        bound, exact = float(tree.value(p, values)[0]), pipeline_length(p, values, items(p, values), 0)
        assert 0 < bound <= exact * (1 + 1e-9), axes
        longer += exact > bound * (1 + 1e-6)
    assert longer > 5  # the schedule says more than its bound


def test_first_stage_of_an_interleaved_pipeline_holds_71_chunks() -> None:
    """p = v = 8: p*v + p - 1 chunks. Source: Narayanan et al. 2021."""
    p = instance(balanced(64, 8, 8))
    in_flight = counts.dense_layers_in_flight(p, {"split": 0, "stage": 0, "grad_acc": 64})
    assert int(in_flight) == 71  # one layer a chunk
    assert int(held(Shape(8, 8, 64), 0).sum(axis=1).max()) == 71


def test_plain_1f1b_holds_pp_microbatches_on_the_first_stage() -> None:
    p = instance(balanced(16, 4, 1))
    in_flight = [
        int(counts.dense_layers_in_flight(p, {"split": 0, "stage": s, "grad_acc": 8})) for s in range(p.splits.slots)
    ]
    assert in_flight[0] == 4 * 4 and in_flight[-1] == 4 * 1
    assert int(counts.dense_layers_in_flight(p, {"split": 0, "stage": 0, "grad_acc": 2})) == 2 * 4


def test_the_bubble_is_not_halved_by_1f1b() -> None:
    """(pp-1)/(m+pp-1) of the step: 46.7 % at pp = m = 8."""
    p = instance(balanced(8, 8, 1))
    total = tree_time(p, 8, 1.0, 0.0)
    assert (total - 8.0) / total == pytest.approx(0.4667, abs=1e-4)


def test_an_illegal_number_of_interleaved_microbatches_has_an_estimate() -> None:
    """Passes of an incomplete group would wait for each other; the group counts as full."""
    problem = Problem("h100-sxm:4x8", "llama3.1-8b", seq_len=1024, gbs=48)
    incomplete = evaluate(problem, "tp=1,pp=4,vpp=2,mbs=1")
    assert any(broken.rule == "microbatch_group" for broken in check(problem, "tp=1,pp=4,vpp=2,mbs=1"))
    assert incomplete.step_time_s > 0


@pytest.mark.parametrize("seed", range(40))
def test_plain_paths_are_paths(seed: int) -> None:
    """None is longer than the schedule, whatever the times."""
    rng = np.random.default_rng(seed)
    pp = int(rng.integers(1, 8))
    shape = shape_of(pp, int(rng.integers(1, 5)) if pp > 1 else 1, int(rng.integers(1, 30)))
    forward, backward = rng.random((2, shape.pp * shape.vpp)) * (rng.random((2, shape.pp * shape.vpp)) > 0.1)
    delay = float(rng.choice([0.0, 0.1, 1.0]))
    length = makespan(shape, forward, backward, delay)
    for paths in plain_paths(shape):
        assert 1 <= len(paths.transfers) <= 4
        lengths = paths.forward @ forward + paths.backward @ backward + paths.transfers * delay
        assert lengths.max() <= length * (1 + 1e-12)


def test_a_plain_path_may_be_the_longest() -> None:
    """Equal stages in plain 1F1B: the last rank's."""
    ones = np.ones(4)
    paths = plain_paths(Shape(4, 1, 8))
    longest = max(float((p.forward @ ones + p.backward @ ones).max()) for p in paths)
    assert longest == makespan(Shape(4, 1, 8), ones, ones) == 22
