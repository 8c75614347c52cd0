"""Zero bubble, ZBV and DualPipeV: length, bound and memory in flight against the event simulation; their rules."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from cut_problems import plain_model
from simulate import order_of, simulate

from parsolve import Problem, load_cluster
from parsolve.api import check_result, solve
from parsolve.cli import main
from parsolve.constraints.memory import dense_layer_activations, dense_layer_waiting
from parsolve.errors import InternalError, NotExpressibleError
from parsolve.evaluation import PIPELINE, instance_for, time_tree
from parsolve.functions import Array
from parsolve.objectives import counts, split_backward
from parsolve.objectives.schedule import Shape, held, held_and_waiting, saturated_shape, shape_of
from parsolve.objectives.schedule_length import makespan
from parsolve.objectives.schedule_paths import critical_path, plain_paths
from parsolve.objectives.step_time import items, pipeline_length, schedule_of
from parsolve.problem import Instance, replace_workload
from parsolve.render.trace import chrome_trace
from parsolve.specs import MoE
from parsolve.specs.workload import SPLIT_BACKWARD
from parsolve.splits import Layers, balanced, from_model_order, model_order, ranks_in_model_order

KINDS = SPLIT_BACKWARD


def random_shape(rng: random.Random, kind: str) -> Shape:
    pp = rng.choice([2, 3, 4, 5, 8])
    vpp = rng.choice([1, 2, 3, 4]) if kind == "zero-bubble" else 2
    return shape_of(pp, vpp, rng.randint(1, 30), kind)


def random_times(rng: random.Random, shape: Shape) -> tuple[Array, Array, float, Array]:
    size = shape.pp * shape.vpp
    times = (np.array([rng.choice([0.01, 1.0, 1.0, 3.0]) * rng.random() for _ in range(size)]) for _ in "FBW")
    forward, backward, weight = times
    return forward, backward, rng.choice([0.0, 0.05, 0.5, 5.0]) * rng.random(), weight


@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_length_equals_the_simulation(kind: str, block: int) -> None:
    """100 pipelines a schedule of unequal stages with delays; a rank's wait and work never exceed it."""
    for seed in range(10 * block, 10 * block + 10):
        rng = random.Random(f"{kind} {seed}")
        shape = random_shape(rng, kind)
        forward, backward, delay, weight = random_times(rng, shape)
        by_rank = [from_model_order(times.tolist(), shape.pp, kind) for times in (forward, backward, weight)]
        expected = simulate(
            by_rank[0], by_rank[1], shape.microbatches, delay=delay, kind=kind, weight=by_rank[2]
        ).makespan
        length = makespan(shape, forward, backward, delay, weight)
        assert length == pytest.approx(expected, rel=1e-9), (seed, shape)
        for rank in range(shape.pp):
            work = (forward + backward + weight)[shape.ranks == rank].sum() * shape.microbatches
            assert forward[:rank].sum() + rank * delay + work <= length * (1 + 1e-9), (seed, shape, rank)


def problem(kind: str, layers: int, is_moe: tuple[bool, ...] = (), framework: str = "generic") -> Problem:
    dense = tuple(i for i, moe in enumerate(is_moe) if not moe)
    moe = MoE(num_experts=8, top_k=2, ffn_size=512, dense_layers=dense) if any(is_moe) else None
    model = plain_model(layers, moe)
    return Problem(load_cluster("h100-sxm:8x8"), model, seq_len=1024, gbs=64, framework=framework, schedule=kind)


@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_layers_held_equal_the_simulation(kind: str, block: int) -> None:
    """100 pipelines a schedule, dense, MoE or both: until their W, between B and W, and the two together.

    Together exactly where all chunks are equal, else never less.
    """
    for seed in range(10 * block, 10 * block + 10):
        rng = random.Random(f"{kind} {seed} layers")
        shape = random_shape(rng, kind)
        pp, vpp, m, _ = shape
        equal, share = rng.random() < 0.3, rng.choice([0.3, 0.7, 1.4])
        sizes = [2] * (pp * vpp) if equal else [rng.randint(0, 5) for _ in range(pp * vpp)]
        cut = from_model_order(sizes if any(sizes) else [1, *sizes[1:]], pp, kind)
        layers = sum(map(sum, cut))
        first = rng.choice([0, layers] if equal else [0, layers, rng.randint(0, layers)])
        given = problem(kind, layers, tuple(i >= first for i in range(layers)))
        p = instance_for(given, cut, 64)
        ones = [[1.0] * vpp for _ in range(pp)]
        here = {"split": np.array([0]), "grad_acc": np.array([m])}
        for name, contents in zip(("dense", "moe"), p.splits.contents[0], strict=True):
            expected = simulate(ones, ones, m, kind=kind, layers=contents.tolist(), weight=ones, share=share)
            in_flight, waiting = (getattr(counts, f"{name}_layers_{what}") for what in ("in_flight", "waiting"))
            for rank in range(pp):
                slots = {**here, "stage": np.flatnonzero(p.splits.rank[0] == rank)}
                assert len(slots["stage"]) == (1 if kind == "zero-bubble" else 2)
                assert in_flight(p, slots).max() == expected.layers[rank], (seed, shape, cut)
                assert waiting(p, slots).max() == expected.waiting[rank], (seed, shape, cut)
                both = (in_flight(p, slots) + share * waiting(p, slots)).max()
                assert both >= expected.both[rank] - 1e-9, (seed, shape, cut)
                assert not equal or both == pytest.approx(expected.both[rank]), (seed, shape, cut)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_and_head_in_flight(kind: str) -> None:
    """Those of the first and last stage; the logits of one microbatch at a time are whole."""
    rng = random.Random(kind)
    for _ in range(30):
        shape = random_shape(rng, kind)
        pp, vpp, m, _ = shape
        p = instance_for(problem(kind, pp * vpp), balanced(pp * vpp, pp, vpp, kind), 64)
        last = int(shape.ranks[-1])
        ranks = p.splits.rank[0]
        assert p.splits.features["first"][0].tolist() == (ranks == 0).tolist()
        assert p.splits.features["last"][0].tolist() == (ranks == last).tolist()
        assert p.splits.weight.sum() == pytest.approx(1)
        steps = [one for step in order_of(0, pp, vpp, m, kind) for one in step]
        assert most(steps, 0, "F", "W") == counts.embeddings_in_flight(p, at(p, 0, m)).max()
        steps = [one for step in order_of(last, pp, vpp, m, kind) for one in step]
        assert most(steps, vpp - 1, "F", "B") == 1
        assert most(steps, vpp - 1, "B", "W") - 1 == counts.heads_waiting(p, at(p, last, m)).max()


def at(p: Instance, rank: int, m: int) -> dict[str, Any]:
    return {"split": 0, "stage": np.flatnonzero(p.splits.rank[0] == rank), "grad_acc": m}


def most(steps: list[tuple[str, int, int]], chunk: int, begin: str, end: str) -> int:
    now = peak = 0
    for side, where, _ in steps:
        now += (where == chunk) * ((side == begin) - (side == end))
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("kind", KINDS)
def test_few_microbatches_hold_as_much_as_many(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(40):
        shape = random_shape(rng, kind)
        shape = shape_of(shape.pp, shape.vpp, shape.microbatches * rng.randint(1, 8), kind)
        few = saturated_shape(shape)
        for rank in range(shape.pp):
            pairs = zip(held_and_waiting(shape, rank), held_and_waiting(few, rank), strict=True)
            assert all(a.tolist() == b.tolist() for many, less in pairs for a, b in zip(many, less, strict=True)), shape


def test_known_in_flight() -> None:
    """ZB1P and ZBV hold as much as 1F1B's first rank, on every rank; DualPipeV half a microbatch more."""
    pp, m = 4, 16
    assert [held(Shape(pp, 1, m, "zero-bubble"), rank).max() for rank in range(pp)] == [pp] * pp
    chunks = [held(Shape(pp, 2, m, "zbv"), rank).sum(axis=1).max() for rank in range(pp)]
    assert chunks == [2 * pp] * pp
    chunks = [held(Shape(pp, 2, m, "dualpipev"), rank).sum(axis=1).max() for rank in range(pp)]
    assert chunks == [2 * pp + 1] * pp


def test_equal_passes_leave_no_bubble_in_a_v() -> None:
    """F = B = W: ZBV has none but the wait for the first pass; ZB1P a third of 1F1B's."""
    one, pp, m = np.ones(8), 4, 16
    work, first = 2 * 3 * m, 1.0 * (pp - 1)
    first_stage = np.array([0.0, *one[1:]])  # all its gradients come with W
    late = np.array([2.0, *one[1:]])
    assert makespan(Shape(pp, 2, m, "zbv"), one, first_stage, 0.0, late) == work + first
    half = np.ones(4)
    whole = makespan(Shape(pp, 1, m), half, 2 * half)
    split = makespan(Shape(pp, 1, m, "zero-bubble"), half, half, 0.0, half)
    assert (whole - 3 * m, split - 3 * m) == (3 * (pp - 1), pp - 1)


def test_stages_in_a_v() -> None:
    assert ranks_in_model_order(3, 2, "zbv").tolist() == [0, 1, 2, 2, 1, 0]
    cut = from_model_order([1, 2, 3, 4, 5, 6], 3, "dualpipev")
    assert cut == ((1, 6), (2, 5), (3, 4))
    assert model_order(cut, "dualpipev") == [1, 2, 3, 4, 5, 6]
    assert balanced(8, 3, 2, "zbv") == ((2, 1), (2, 1), (1, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_no_paths_are_looked_for(kind: str) -> None:
    shape, one = shape_of(2, 2, 8, kind), np.ones(4)
    with pytest.raises(InternalError, match="split"):
        plain_paths(shape)
    with pytest.raises(InternalError, match="split"):
        critical_path(shape, one, one)


def random_cut(rng: random.Random, layers: int, pp: int, vpp: int, kind: str) -> Layers:
    sizes = [1] * (pp * vpp)
    for _ in range(layers - pp * vpp):
        sizes[rng.randrange(pp * vpp)] += 1
    return from_model_order(sizes, pp, kind)


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_never_exceeds_the_schedule(kind: str, model: str) -> None:
    """Real problems with embedding, output layer and transfers; the passes' times are those of the whole backward."""
    rng = random.Random(f"{kind} {model}")
    longer = 0
    for _ in range(20):
        pp, tp, dp = rng.choice([2, 4, 8]), rng.choice([1, 2, 4]), rng.choice([1, 2])
        vpp = rng.choice([1, 2, 3]) if kind == "zero-bubble" else 2
        gbs = 8 * dp * pp * rng.randint(2, 4)
        framework, recompute = rng.choice([("torchtitan", 0), ("generic", rng.randint(0, 2))])
        given = Problem(f"h100-sxm:{pp * tp * dp}x8", model, seq_len=1024, gbs=gbs, framework=framework, schedule=kind)
        p = instance_for(given, random_cut(rng, given.model.num_layers, pp, vpp, kind), gbs)
        axes = {"tp": tp, "cp": 1, "pp": pp, "ep": 1, "etp": tp, "dp": 8 * dp, "edp": 8 * dp, "vpp": vpp, "zero": 1}
        axes |= {"mbs": 1, "grad_acc": gbs // dp // 8, "recompute": recompute, "split": 0, "shards": 8 * dp}
        values = {axis: np.array([value]) for axis, value in axes.items()}
        tree = next(quantity for quantity in time_tree(p) if quantity.name == PIPELINE)
        bound, exact = float(tree.value(p, values)[0]), pipeline_length(p, values, items(p, values), 0)
        assert 0 < bound <= exact * (1 + 1e-9), axes
        longer += exact > bound * (1 + 1e-6)
        _, forward, backward, _, weight = schedule_of(p, values, items(p, values), 0)
        other = replace_workload(given, schedule="1f1b")
        q = instance_for(other, from_model_order(model_order(p.splits.cuts[0].layers, kind), pp), gbs)
        _, there, back, _, none = schedule_of(q, values, items(q, values), 0)
        assert none is None and weight is not None
        assert np.allclose(forward, there) and np.allclose(backward + weight, back)
        assert backward[0] == 0 and np.all(backward[1:] > 0) and np.all(weight > 0)
    assert longer > 3 or kind != "zero-bubble"


def test_weight_gradients_are_half_of_the_matrix_products() -> None:
    """Llama's layer: one forward's worth of the products; attention and elementwise operations belong to B."""
    given = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=4096, gbs=64, framework="torchtitan", schedule="zbv")
    p = instance_for(given, balanced(32, 2, 2, "zbv"), 64)
    axes = dict.fromkeys(("cp", "ep", "mbs"), 1) | dict.fromkeys(("tp", "etp"), 2) | {"pp": 2, "dp": 2, "edp": 2}
    axes |= {"vpp": 2, "zero": 1, "grad_acc": 32, "recompute": 0, "split": 0, "shards": 2}
    values = {axis: np.array([value]) for axis, value in axes.items()}
    of = items(p, values).row(0)
    assert of.weight is not None
    time = {part.term.name: float(part.term(p, values)[0]) for part in time_tree(p)[0].parts if part.count}
    products, late = time["attention_projections"] / 3, 2 / 3 * time["dense_layer_accumulation"]
    assert products < of.weight[0] - late < products + time["dense_mlp"] / 3
    others = time["attention_core"] + time["attention_elementwise"] + time["attention_tensor_comm"]
    assert of.dense[1] - of.weight[0] > of.weight[0] - late + 2 / 3 * others


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("zbv", "pp=2,mbs=1"),
        ("dualpipev", "pp=2,vpp=4,mbs=1"),
        ("dualpipev", "pp=4,vpp=2,mbs=4"),
        ("zero-bubble", "pp=8,mbs=1,grad_acc=17"),
    ],
)
def test_what_has_no_schedule_has_an_estimate(kind: str, text: str) -> None:
    given = Problem("h100-sxm:2x8", "llama3.1-8b", seq_len=1024, gbs=64, framework="generic", schedule=kind)
    plan = check_result(given, text).plans[0]
    assert plan.violations and plan.estimate.step_time_s > 0


NAMES = {"zero-bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_printed_with_its_passes(kind: str) -> None:
    given = Problem("h100-sxm:2x8", "llama3.1-8b", seq_len=1024, gbs=64, framework="torchtitan", schedule=kind)
    plan = check_result(given, "pp=4,vpp=2,tp=2,mbs=1,zero=1,layers_per_stage=3|4*5|5|4").plans[0]
    assert not plan.violations
    order = [3, 4, 4, 4, 4, 4, 5, 4]
    cut = plan.config.layers_per_stage
    assert model_order(cut, kind) == order
    assert cut == (((3, 4), (4, 4), (4, 5), (4, 4)) if kind == "zero-bubble" else ((3, 4), (4, 5), (4, 4), (4, 4)))
    assert f"--parallelism.pipeline-parallel-schedule {NAMES[kind]}" in plan.args("torchtitan")
    with pytest.raises(NotExpressibleError, match="1F1B only"):
        plan.args("megatron")
    made = plan.launch("torchtitan")
    text = made.files["titan_model.py"]
    assert "donated_buffer = False" in text
    scope: dict[str, Any] = {}
    listed = text[text.index("module_fqns_per_model_part=") + 27 : text.rindex("]") + 1]
    exec(f"stages = {listed}", scope)
    assert [sum(name.startswith("layers.") for name in stage) for stage in scope["stages"]] == order
    assert any("DualPipeV" in note for note in made.notes) == (kind == "dualpipev")
    trace = json.loads(chrome_trace(plan))
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    m = plan.config.grad_acc
    assert Counter(event["name"][0] for event in passes) == {"F": 8 * m, "B": 8 * m, "W": 8 * m}
    assert {event["cat"] for event in passes} == {"forward", "backward for inputs", "backward for weights"}
    for event in passes:
        args = event["args"]
        assert ranks_in_model_order(4, 2, kind)[args["stage"]] == event["pid"]
        assert args["layers"] == cut[event["pid"]][args["chunk"]] == order[args["stage"]]
    longest = max(event["ts"] + event["dur"] for event in passes) / 1e6
    beside = sum(plan.estimate.terms_s.get(name, 0.0) for name in ("dp_comm", "gather_comm", "optimizer", "fixed"))
    assert longest == pytest.approx(plan.estimate.step_time_s - beside)
    assert [stage["rank"] for stage in plan.to_json([])["stages"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_is_held(kind: str) -> None:
    """Before their W activations and gradients, recomputed ones whole: only where few wait does recomputing save."""
    given = Problem("h100-sxm:2x8", "llama3.1-8b", seq_len=1024, gbs=64, framework="generic", schedule=kind)
    text = "pp=4,tp=2,mbs=1,zero=1" + ("" if kind == "zero-bubble" else ",vpp=2")
    none, full = (check_result(given, f"{text},recompute={r}").plans[0] for r in ("none", "full"))
    plain = check_result(replace_workload(given, schedule="1f1b"), f"{text},recompute=none").plans[0]
    held_here, held_there = (plan.stages[3].parts["activations"] for plan in (none, plain))
    assert held_here > 1.2 * held_there
    assert full.stages[0].parts["activations"] < none.stages[0].parts["activations"]
    if kind == "zero-bubble":
        assert none.stages[3].parts["logits"] > plain.stages[3].parts["logits"]


def test_gradients_that_wait_are_as_measured() -> None:
    """PyTorch 2.13, stage_backward_input over such layers: 15 hidden sizes a token in the parameter groups."""
    model = plain_model(8, None).model_copy(update={"gated_mlp": True})
    model = model.model_copy(update={"ffn_size": 4 * model.hidden_size, "num_kv_heads": model.num_heads})
    given = Problem("h100-sxm:1x8", model, seq_len=1024, gbs=64, framework="torchtitan", schedule="zbv")
    p = instance_for(given, balanced(8, 2, 2, "zbv"), 64)
    assert model.num_heads * model.head_dim == model.hidden_size
    waits = dense_layer_waiting(p, {"tp": 1, "cp": 1, "mbs": 1, "recompute": 0})
    assert float(waits) == pytest.approx(2 * 1024 * 15 * model.hidden_size)
    again = dense_layer_waiting(p, {"tp": 1, "cp": 1, "mbs": 1, "recompute": 2})
    kept = [dense_layer_activations(p, {"tp": 1, "cp": 1, "mbs": 1, "recompute": r}) for r in (0, 2)]
    assert float(again - waits) == pytest.approx(float(kept[0] - kept[1]))


def test_tied_embeddings_of_a_v_are_one_copy() -> None:
    given = Problem("h100-sxm:1x8", "gpt2-1.5b", seq_len=1024, gbs=64, framework="generic")
    text = "pp=4,tp=2,vpp=2,mbs=1"
    looped, folded = (check_result(replace_workload(given, schedule=s), text).plans[0] for s in ("zero-bubble", "zbv"))
    copy = looped.stages[3].parts["parameters"] - folded.stages[3].parts["parameters"]
    assert copy == pytest.approx(2 * given.model.vocab_size * given.model.hidden_size / 2, rel=0.02)
    assert folded.stages[0].parts["parameters"] == pytest.approx(looped.stages[0].parts["parameters"], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_takes_it(kind: str) -> None:
    words = ["solve", "h100-sxm:1x8", "llama3.1-8b", "--seq-len", "1024", "--gbs", "64", "--framework", "torchtitan"]
    answer = CliRunner().invoke(main, [*words, "--schedule", kind, "--min", "pp=2", "--top", "2"])
    assert answer.exit_code == 0, answer.output
    assert {"zero-bubble": "zero bubble", "zbv": "ZBV", "dualpipev": "DualPipeV"}[kind] in answer.stdout


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
@pytest.mark.parametrize("kind", KINDS)
def test_infeasible_where_the_launcher_has_no_such_schedule(kind: str, framework: str) -> None:
    given = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=1024, gbs=64, framework=framework, schedule=kind)
    found = solve(given, pin={"pp": 4})
    assert found.status == "infeasible" and found.infeasible is not None
    assert "split_backward_launcher" in {member.rule for member in found.infeasible.conflict}


def test_a_split_backward_pass_is_faster_where_the_pipeline_is_short_of_microbatches() -> None:
    given = Problem("h100-sxm:2x8", "llama2-13b", seq_len=2048, gbs=32, framework="torchtitan")
    times = {}
    for kind in ("1f1b", *KINDS):
        found = solve(replace_workload(given, schedule=kind), top=1, pin={"pp": 4, "mbs": 1, "tp": 2, "vpp": 2})
        times[kind] = found.plans[0].estimate.bubble_fraction
    assert times["zero-bubble"] < 0.5 * times["1f1b"]
    assert times["zbv"] < times["zero-bubble"]


def test_legal_numbers_of_microbatches() -> None:
    """As PyTorch's classes check them."""
    legal = split_backward.legal_microbatches
    assert [legal("zero-bubble", 4, m) for m in (1, 3, 7, 8, 9, 10, 11, 13)] == [1, 3, 7, 8, 10, 10, 12, 15]
    assert [legal("dualpipev", 4, m) for m in (1, 8, 9)] == [8, 8, 9]
    assert legal("zbv", 4, 1) == 1
