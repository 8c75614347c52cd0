"""recompute=block: the first layers of every chunk are recomputed; time, memory, lists, and what launchers say."""

from __future__ import annotations

import csv
import io
import random
from dataclasses import replace

import numpy as np
import pytest
from launch_problems import config, options, problem
from oracle import enumerate_all
from problems import random_problem
from seeds import first_of
from simulate import order_of, simulate

import parsolve
from parsolve import Problem, SpecError
from parsolve.api import make_plan
from parsolve.config import Config
from parsolve.errors import NotExpressibleError
from parsolve.evaluation import PIPELINE, axis_values, instance_of, pipeline_length, schedule_of, time_tree
from parsolve.from_megatron import read_megatron
from parsolve.launchers import launch
from parsolve.objectives import counts
from parsolve.objectives.step_time import items
from parsolve.optimizer.ranking import Query, rank, without_cut
from parsolve.problem import Instance, replace_workload
from parsolve.reading import parse_config
from parsolve.render import words
from parsolve.render.data import to_csv
from parsolve.render.table import render_table
from parsolve.specs import Model, Recompute
from parsolve.splits import Layers, Split, Splits, classify, from_model_order

GPT = {"num_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64}


def small(cluster: str = "h100-sxm:1x1", **changes: object) -> Problem:
    shape = Model.read({"name": "small", "vocab_size": 32000, "gated_mlp": False, **GPT}, "test")
    return Problem(cluster, shape, **{"seq_len": 1024, "gbs": 8, **changes})


def full_config(of: Problem, text: str) -> Config:
    return parse_config(text, of)[0]


def activations(of: Problem, text: str) -> float:
    given = full_config(of, text)
    return max(stage.parts["activations"] for stage in make_plan(of, given).stages)


def test_memory_by_hand() -> None:
    """A kept layer saves 32 h + 64 bytes a token (norms 8 h, q k v 6 h, output 2 h, MLP 16 h, row sums 4*16), one that
    is recomputed its input of 2 h, and the embedding 2 h."""
    of = small()
    tokens, hidden = 1024, 1024
    kept = tokens * (32 * hidden + 64) * of.profile.activation_memory
    inputs = 2 * tokens * hidden
    for again in (1, 3, 7):
        expected = inputs + again * inputs + (8 - again) * kept
        assert activations(of, f"tp=1,recompute=block,recompute_layers={again}") == pytest.approx(expected, rel=1e-12)
    assert activations(of, "tp=1") == pytest.approx(inputs + 8 * kept, rel=1e-12)


def test_memory_of_a_pipeline_by_hand() -> None:
    """Four microbatches are held on the first of four stages: of 2 layers one is recomputed, or both where R covers a
    stage: then one is rebuilt on top of what is held."""
    of = small("h100-sxm:1x4")
    tokens, hidden = 1024, 1024
    kept, inputs = tokens * (32 * hidden + 64) * of.profile.activation_memory, 2 * tokens * hidden
    rebuilt = tokens * 32 * hidden * of.profile.activation_memory  # without the row sums
    assert activations(of, "pp=4,recompute=block,recompute_layers=1") == pytest.approx(4 * (inputs + inputs + kept))
    uneven = "pp=4,recompute=block,recompute_layers=2,layers_per_stage=2|2|3|1"
    plan = make_plan(of, full_config(of, uneven))
    found = [stage.parts["activations"] for stage in plan.stages]
    expected = [4 * 3 * inputs + rebuilt, 3 * 2 * inputs + rebuilt, 2 * (2 * inputs + kept), inputs + rebuilt]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("model", ["llama2-7b", "mixtral-8x7b"])
@pytest.mark.parametrize("grid", ["tp=1", "tp=2,pp=4", "tp=1,pp=4,vpp=2"])
def test_time_lies_on_the_line_between_none_and_full(model: str, grid: str) -> None:
    """Layers are alike and chunks even: each recomputed layer of a chunk costs the same share of the whole."""
    ep = ",ep=2,etp=1" if model == "mixtral-8x7b" else ""
    of = Problem("h100-sxm:1x8", model, seq_len=2048, gbs=32)
    none, full = (parsolve.evaluate(of, f"{grid}{ep},recompute={kind}") for kind in ("none", "full"))
    chunk = len(full_config(of, grid).layers_per_stage[0])
    size = 32 // (full_config(of, grid).pp * chunk)
    hidden = "dp_comm"  # what is exposed of it is not linear
    for layers in range(1, size):
        partly = parsolve.evaluate(of, f"{grid}{ep},recompute=block,recompute_layers={layers}")
        low, high, here = (x.step_time_s - x.terms_s.get(hidden, 0.0) for x in (none, full, partly))
        assert here == pytest.approx(low + layers / size * (high - low), rel=1e-9)
        assert partly.terms_s["recomputation"] > 0
        assert none.terms_s.get(hidden, 0.0) >= partly.terms_s.get(hidden, 0.0) >= full.terms_s.get(hidden, 0.0)


def random_cut(rng: random.Random) -> tuple[Layers, tuple[bool, ...]]:
    pp, vpp = rng.choice([1, 2, 3, 4]), rng.choice([1, 1, 2, 3])
    vpp = vpp if pp > 1 else 1
    sizes = [rng.randint(0 if pp > 1 else 1, 4) for _ in range(pp * vpp)]
    if rng.random() < 0.3:
        sizes = [3] * (pp * vpp)
    sizes[0] += not sum(sizes)
    kinds = rng.choice([(False,), (True,), (False, True), (False, False, True)])
    order = (kinds * sum(sizes))[: sum(sizes)]
    if rng.random() < 0.5:
        order = tuple(sorted(order))  # dense layers first
    return from_model_order(sizes, pp), order


def moe_problem(order: tuple[bool, ...], world: int, gbs: int) -> Problem:
    shape = {**GPT, "name": "mixed", "vocab_size": 32000, "gated_mlp": True, "num_layers": len(order)}
    if any(order):
        dense = [i for i, moe in enumerate(order) if not moe]
        shape["moe"] = {"num_experts": 4, "top_k": 2, "ffn_size": 2048, "dense_layers": dense}
    return Problem(f"h100-sxm:{world}x8", Model.read(shape, "test"), seq_len=512, gbs=gbs)


def random_plan(seed: int) -> tuple[Instance, Config]:
    rng = random.Random(seed)
    cut, order = random_cut(rng)
    pp, vpp = len(cut), len(cut[0])
    depth = pp * rng.randint(1, 4) if vpp > 1 else rng.randint(1, 10)
    of = moe_problem(order, pp, 8 * depth)
    text = f"pp={pp},vpp={vpp},tp=1,layers_per_stage=" + "|".join(str(r[c]) for c in range(vpp) for r in cut)
    layers = rng.randint(1, max(map(max, cut)))
    given = full_config(of, f"{text},recompute=block,recompute_layers={layers}")
    assert given.grad_acc == depth
    return instance_of(of, given), given


def recomputed_kinds(p: Instance, given: Config) -> list[list[tuple[int, int, int, int]]]:
    """[rank][chunk] dense and MoE layers, and those of them that are recomputed, counted one by one."""
    flags, start = list(p.model.layer_is_moe), 0
    found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(given.pp)]
    for chunk in range(given.vpp):
        for at, row in enumerate(found):
            kinds = flags[start : start + given.layers_per_stage[at][chunk]]
            start += len(kinds)
            again = kinds[: given.recompute_layers]
            row.append((kinds.count(False), kinds.count(True), again.count(False), again.count(True)))
    return found


@pytest.mark.parametrize("block", range(10))
def test_schedule_equals_the_simulation(block: int) -> None:
    """300 pipelines: unequal chunks, two kinds of layers in any order; recomputation is part of the backward pass."""
    for seed in range(30 * block, 30 * block + 30):
        p, given = random_plan(seed)
        values = {axis: np.array([value]) for axis, value in axis_values(p, given).items()}
        of = items(p, values)
        one = of.row(0)
        kinds = recomputed_kinds(p, given)
        forward, backward = (
            [[d * one.dense[i] + e * one.moe[i] + one.transfer for d, e, _, _ in row] for row in kinds] for i in (0, 1)
        )
        for row, times in zip(kinds, backward, strict=True):
            for chunk, (_, _, dense, moe) in enumerate(row):
                times[chunk] += dense * one.dense_again + moe * one.moe_again
        for i, times in enumerate((forward, backward)):
            times[0][0] += one.embedding[i]
            times[-1][-1] += one.head[i]
        length = simulate(forward, backward, given.grad_acc, delay=one.delay).makespan
        assert pipeline_length(p, values, of, 0) == pytest.approx(length, rel=1e-9)
        tree = next(quantity for quantity in time_tree(p) if quantity.name == PIPELINE)
        assert float(tree.value(p, values)[0]) <= length * (1 + 1e-9)
        assert schedule_of(p, values, of, 0)[0].microbatches == given.grad_acc


def held_over_time(given: Config, at: int) -> list[list[int]]:
    """Microbatches held of each chunk of a rank after each of its passes."""
    held, found = [0] * given.vpp, []
    for ((side, chunk, _),) in order_of(at, given.pp, given.vpp, given.grad_acc, "1f1b"):
        held[chunk] += 1 if side == "F" else -1
        found.append(list(held))
    return found


@pytest.mark.parametrize("block", range(5))
def test_what_is_held_is_never_less_than_at_any_moment(block: int) -> None:
    """Equal where the chunks of a rank are equal and of one kind, so that one moment is the worst for everything."""
    for seed in range(40 * block, 40 * block + 40):
        p, given = random_plan(seed)
        rng = random.Random(seed)
        full, inputs = np.array([rng.uniform(2, 9), rng.uniform(2, 9)]), rng.uniform(0.5, 2)
        kinds = recomputed_kinds(p, given)
        for slot, at in enumerate(p.splits.rank[0].tolist()):
            here = {"split": 0, "stage": slot, "grad_acc": given.grad_acc}
            kept = (counts.dense_kept_in_flight(p, here), counts.moe_kept_in_flight(p, here))
            every = counts.dense_layers_in_flight(p, here) + counts.moe_layers_in_flight(p, here)
            counted = float(np.dot(kept, full - inputs) + every * inputs)
            chunks = np.array(kinds[at])
            bytes_of = chunks[:, 2:].sum(axis=1) * inputs + (chunks[:, :2] - chunks[:, 2:]) @ full
            most = max(float(np.dot(moment, bytes_of)) for moment in held_over_time(given, at))
            assert counted >= most * (1 - 1e-9)
            if len({tuple(chunk) for chunk in kinds[at]}) == 1:
                assert counted == pytest.approx(most)


def test_features_of_every_cut_are_those_of_the_cut_alone() -> None:
    """Many cuts at once, with any number of recomputed layers, against one at a time."""
    rng = random.Random(5)
    order = tuple(rng.random() < 0.6 for _ in range(12))
    cuts = [((12,),), ((5,), (7,)), ((2, 4), (3, 3)), ((3, 3), (3, 3)), ((4,), (4,), (4,)), ((1,), (2,), (3,), (6,))]
    of = [Split(cut, classify(cut, 12), n) for cut in cuts for n in range(max(map(max, cut)))]
    rng.shuffle(of)
    together = moe_problem(order, 1, 8).instance(8, Splits(order, of, every_rank=True))
    slots = np.arange(together.splits.slots)
    for i, cut in enumerate(of):
        alone = moe_problem(order, 1, 8).instance(8, Splits(order, [cut], every_rank=True))
        for count in vars(counts).values():
            if isinstance(count, type(counts.is_first)):
                both = []
                for p, at in ((together, i), (alone, 0)):
                    here = {"split": at, "stage": slots[: cut.pp], "grad_acc": 6}
                    both.append(np.broadcast_to(np.asarray(count(p, here), dtype=float), (cut.pp,)))
                assert np.array_equal(*both), (count.name, cut)


def legal(of: Problem, given: Config) -> bool:
    return not parsolve.check(of, given)


def test_the_list_has_each_plan_once_with_the_least_number_that_fits() -> None:
    of = Problem("a100-sxm-40gb:1x8", "llama3.1-8b", seq_len=4096, gbs=64)
    plans = rank(of, Query(40)).plans
    assert len({without_cut(plan.config) for plan in plans}) == len(plans) == 40
    partly = [plan.config for plan in plans if plan.config.recompute == Recompute.BLOCK]
    assert len(partly) > 5
    for given in partly:
        fewer = given.recompute_layers - 1
        kind = Recompute.BLOCK if fewer else Recompute.NONE
        assert legal(of, given) and not legal(of, replace(given, recompute_layers=fewer, recompute=kind))


def tight_problem(seed: int) -> Problem:
    """A random problem whose fastest plan without recomputation just does not fit."""
    of = random_problem(30_000 + seed)
    framework = ("megatron", "nemo", "generic")[seed % 3]
    kinds = (tuple(Recompute), (Recompute.NONE, Recompute.BLOCK), (Recompute.BLOCK, Recompute.FULL))[seed // 3 % 3]
    of = replace_workload(of, framework=framework, framework_version=None, recompute=kinds)
    plain = replace_workload(of, recompute=(Recompute.NONE,)).with_(without={"memory"})
    plans = rank(plain, Query(1, cuts="listed")).plans
    if not plans:
        return of
    need = make_plan(plain, plans[0].config).estimate.memory_bytes["total"]
    gpu = of.cluster.gpu.model_copy(
        update={"memory_bytes": int(need * random.Random(seed).choice([0.95, 0.98, 0.995]))}
    )
    return of.with_(cluster=of.cluster.model_copy(update={"gpu": gpu}))


@pytest.mark.parametrize("block", first_of(range(15), 4))
def test_tight_problems_equal_the_oracle(block: int) -> None:
    """Over listed cuts and over any, 24 problems (90 with the slow tests): the same plans, order, and costs."""
    for seed in range(6 * block, 6 * block + 6):
        of, k = tight_problem(seed), (1, 5, 20)[seed % 3]
        any_cut = seed % 2 == 0
        ranking = rank(of, Query(k, cuts="any" if any_cut else "listed"))
        expected = enumerate_all(of, k, any_cut)
        assert ranking.complete
        if any_cut:
            found = [(plan.key, without_cut(plan.config)) for plan in ranking.plans]
            assert found == [(key, without_cut(given)) for key, given in expected]
        else:
            assert [(plan.key, plan.config) for plan in ranking.plans] == expected


def test_tight_problems_have_plans_with_it() -> None:
    plans = [rank(tight_problem(seed), Query(5, cuts="listed")).plans for seed in range(24)]
    assert sum(any(plan.config.recompute == Recompute.BLOCK for plan in of) for of in plans) >= 8


@pytest.mark.parametrize("pins", [{"recompute": "block"}, {"recompute_layers": "3"}, {"recompute_layers": "2,5"}])
def test_pins(pins: dict[str, str]) -> None:
    of = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=4096, gbs=64)
    plans = parsolve.solve(of, pin=pins, top=4).plans
    assert len(plans) == 4
    for plan in plans:
        assert plan.config.recompute == Recompute.BLOCK and legal(of, plan.config)
        assert str(plan.config.recompute_layers) in pins.get("recompute_layers", str(plan.config.recompute_layers))
    least = parsolve.solve(of, min={"recompute_layers": 4}, top=1).best.config
    most = parsolve.solve(of, max={"recompute_layers": 0}, top=1).best.config
    assert least.recompute_layers == 4 and most.recompute != Recompute.BLOCK


def test_other_frameworks_do_not_have_it() -> None:
    of = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=4096, gbs=64, framework="torchtitan")
    result = parsolve.solve(of, pin={"recompute": "block"})
    assert result.status == "infeasible" and "recompute=block" in str(result.infeasible)
    given = full_config(of, "tp=8,recompute=block,recompute_layers=2")
    assert "block_recomputation" in {v.rule for v in parsolve.check(of, given)}
    megatron = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=4096, gbs=64)
    with pytest.raises(NotExpressibleError, match="block"):
        launch("torchtitan", of, given)
    for name in ("torchtitan", "deepspeed", "accelerate"):
        with pytest.raises(NotExpressibleError, match="block"):
            launch(name, megatron, replace(given, tp=1, etp=1, dp=8, edp=8, grad_acc=8, sequence_parallel=False))


def test_launch_lines() -> None:
    p = problem()
    found = options(launch("megatron", p, config(p, pp=2, recompute=Recompute.BLOCK, recompute_layers=5)))
    assert found["--recompute-granularity"] == ["full"]
    assert found["--recompute-method"] == ["block"]
    assert found["--recompute-num-layers"] == ["5"]
    words = launch("nemo", p, config(p, pp=2, recompute=Recompute.BLOCK, recompute_layers=5)).argv
    assert {"model.recompute_method=block", "model.recompute_num_layers=5"} <= set(words)


def test_from_a_line_of_megatron() -> None:
    p = problem(cluster="h100-sxm:2x8")
    given = config(p, pp=4, vpp=2, recompute=Recompute.BLOCK, recompute_layers=1)
    line = launch("megatron", p, given).line()

    def read(text: str) -> tuple[dict[str, object], list[str]]:
        today = read_megatron(text, p.cluster, p.model, (0, 19))
        return today.config, today.notes

    axes, _ = read(line)
    assert full_config(p, ",".join(f"{k}={v}" for k, v in axes.items())) == replace(given, zero=int(str(axes["zero"])))
    whole = line.replace("--recompute-num-layers 1", "--recompute-num-layers 2")
    assert read(whole)[0]["recompute"] == "full" and "recompute_layers" not in read(whole)[0]
    uniform = line.replace("--recompute-method block", "--recompute-method uniform")
    assert read(uniform)[0] == {
        name: v for name, v in {**axes, "recompute": "full"}.items() if name != "recompute_layers"
    }
    assert not any("recompute" in note for note in read(uniform)[1])
    several = uniform.replace("--recompute-num-layers 1", "--recompute-num-layers 2")
    assert read(several)[0]["recompute"] == "full" and "every 2th layer" in " ".join(read(several)[1])
    for broken in (line.replace("--recompute-method block ", ""), line.replace("--recompute-num-layers 1 ", "")):
        with pytest.raises(SpecError, match="recompute-"):
            read(broken)


def test_results_without_the_key_are_read() -> None:
    of = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=4096, gbs=64)
    data = parsolve.solve(of, top=1).plans[0].config.to_json()
    assert data.pop("recompute_layers") == 0
    assert Config.from_json(data).recompute_layers == 0
    partly = full_config(of, "tp=8,recompute=block,recompute_layers=2")
    assert Config.from_json(partly.to_json()) == partly


def test_words() -> None:
    of = Problem("h100-sxm:16x8", "llama2-70b", seq_len=4096, gbs=1024)
    result = parsolve.solve(of, top=2, pin={"recompute": "block", "pp": 4})
    best = result.best.config
    data = result.to_json()
    text = render_table(data)
    assert f"recompute=block,recompute_layers={best.recompute_layers}" in " ".join(text.split())
    assert f"block {best.recompute_layers}" in text and "recomputation" in text and " recomputed  " in text
    assert data["problem"]["domains"]["recompute_layers"] and "recompute_layers 1.." in words.certificate(data)
    (row, _) = csv.DictReader(io.StringIO(to_csv(data)))
    assert (row["recompute"], row["recompute_layers"]) == ("block", str(best.recompute_layers))
    sizes = [[min(n, best.recompute_layers) for n in rank] for rank in best.layers_per_stage]
    assert [stage["recomputed"] for stage in data["plans"][0]["stages"]] == sizes
