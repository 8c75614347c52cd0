"""Multi-token prediction: parameters, memory and time of a module by hand, who trains it, and what is printed of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from launch_problems import config, experts, model, options
from simulate import simulate

import parsolve
from parsolve import NotExpressibleError, Problem, SpecError
from parsolve.api import assumptions, check_result, plan_instance
from parsolve.cli import main
from parsolve.config import Config
from parsolve.evaluation import estimate, instance_for, instance_of, model_flops_per_token, stage_memories, time_tree
from parsolve.from_megatron import read_megatron
from parsolve.launchers import launch
from parsolve.launchers.megatron import layout_text
from parsolve.objectives import counts, data_comm, multi_token, pipeline_comm, step_time, tensor_comm
from parsolve.objectives.schedule_length import makespan
from parsolve.presets import load_model_preset
from parsolve.problem import replace_workload
from parsolve.specs import Recompute
from parsolve.splits import Splits, held_before_last, saturated

HIDDEN, VOCAB, TOKENS = 1024, 32000, 4096
ATTENTION = (2 * 16 + 2 * 4) * 64 * HIDDEN
LAYER = ATTENTION + 3 * HIDDEN * 4096 + 2 * HIDDEN
OWN = 2 * HIDDEN**2 + 3 * HIDDEN
"""A layer of ``launch_problems.model``, and what a module has beside it."""


def problem(cluster: str = "h100-sxm:1x2", shape: Any = None, **changes: Any) -> Problem:
    return Problem(cluster, shape or model(mtp_layers=1), **{"seq_len": TOKENS, "gbs": 16, **changes})


def memories(p: Problem, plan: Config) -> list[dict[str, float]]:
    return [stage.parts for stage in stage_memories(instance_for(p, plan.layers_per_stage, plan.gbs), plan)]


def memories_of(p: Problem, plan: Config) -> list[dict[str, float]]:
    return [stage.parts for stage in stage_memories(instance_of(p, plan, every_rank=True), plan)]


def more(trained: Problem, **axes: Any) -> list[dict[str, float]]:
    """What training the modules adds to the memory of each stage."""
    without = replace_workload(trained, mtp_layers=0)
    pairs = zip(*(memories(p, config(p, **axes)) for p in (trained, without)), strict=True)
    return [{name: a[name] - b[name] for name in a} for a, b in pairs]


def test_parameters_are_counted_apart() -> None:
    shape = model(mtp_layers=2)
    assert shape.num_params == model().num_params
    assert shape.mtp_params == 2 * (OWN + LAYER)
    moe = model(mtp_layers=1, moe=experts(dense_layers=(0,)))
    assert moe.mtp_params == OWN + moe.moe_layer_dense_params + 8 * 3 * HIDDEN * 2048
    last_dense = model(mtp_layers=1, moe=experts(dense_layers=(15,)))
    assert last_dense.mtp_params == OWN + LAYER, "a module has a layer of the kind of the last one"


def test_deepseek_v3() -> None:
    """DeepSeek-AI 2024: 671B in the main model; the hub's README: 11.5B more of modules' own."""
    shape = load_model_preset("deepseek-v3")
    assert shape.num_params == pytest.approx(671.03e9, rel=1e-4)
    assert shape.mtp_params == pytest.approx(11.6e9, rel=0.01)


@pytest.mark.parametrize("tp", [1, 2])
def test_states_on_the_only_stage(tp: int) -> None:
    """6 + 12/shards bytes a parameter; embedding and output layer are shared."""
    (stage,) = more(problem(), tp=tp)
    norms = 5 * HIDDEN  # replicated
    held = (OWN + LAYER - norms) / tp + norms
    assert stage["parameters"] == pytest.approx(2 * held)
    assert stage["gradients"] == pytest.approx(4 * held)
    assert stage["optimizer"] == pytest.approx(12 * held / (2 // tp))


def test_a_pipelines_last_stage_has_the_embedding_too() -> None:
    first, last = more(problem(mtp_layers=2), pp=2)
    assert set(first.values()) == {0.0}
    assert last["parameters"] == pytest.approx(2 * (2 * (OWN + LAYER) + VOCAB * HIDDEN))


def test_experts_of_a_module_are_sharded_like_all() -> None:
    shape = model(mtp_layers=1, moe=experts())
    (stage,) = more(problem("h100-sxm:1x4", shape), ep=2, etp=1)
    routed = 8 * 3 * HIDDEN * 2048 / 2
    dense = OWN + shape.moe_layer_dense_params
    assert stage["parameters"] == pytest.approx(2 * (routed + dense))
    assert stage["optimizer"] == pytest.approx(12 * (routed / 2 + dense / 4))


@pytest.mark.parametrize("modules", [1, 2])
def test_activations_of_one_microbatch(modules: int) -> None:
    """Without recomputation a layer's, and 12 bytes x hidden a token: two norms' inputs, their concatenation, the final
    norm. Recomputed: the two inputs and the final norm, 8. The logits come once more for each module."""
    trained = problem(mtp_layers=modules)
    p = instance_for(trained, config(trained, pp=2).layers_per_stage, 16)
    point = {"tp": 1, "cp": 1, "mbs": 1, "etp": 1, "recompute": Recompute.NONE}
    from parsolve.constraints import memory

    layer = float(memory.dense_layer_activations(p, point))
    for recompute, each in ((Recompute.NONE, layer + 12 * HIDDEN * TOKENS), (Recompute.FULL, 8 * HIDDEN * TOKENS)):
        _, last = more(trained, pp=2, recompute=recompute)
        assert last["activations"] == pytest.approx(modules * each)
        assert last["logits"] == pytest.approx(modules * float(memory.logits(p, point)))


def test_gpipe_holds_every_microbatch_of_a_module() -> None:
    trained = problem(framework="generic", schedule="gpipe", mtp_layers=2)
    p = instance_for(trained, config(trained, pp=2).layers_per_stage, 16)
    at = {"split": 0, "grad_acc": 8}
    assert counts.gpipe_mtp_modules_in_flight(p, {**at, "stage": np.arange(2)}).tolist() == [0, 16]
    alone = instance_for(trained, config(trained).layers_per_stage, 16)
    assert counts.gpipe_mtp_modules_in_flight(alone, {**at, "stage": np.arange(1)}).tolist() == [2]


def test_a_rebuilt_module_counts_where_it_is_larger_than_the_logits() -> None:
    """The logits are gone by then: of a small vocabulary they are the smaller."""
    from parsolve.constraints.memory import mtp_working_set

    point = {"tp": 1, "cp": 1, "mbs": 1, "etp": 1, "recompute": Recompute.FULL}
    for vocab, needed in ((1000, True), (256000, False)):
        trained = problem(shape=model(mtp_layers=1, vocab_size=vocab))
        p = trained.instance(16, Splits((), ()))
        assert (float(mtp_working_set(p, point)) > 0) is needed
        assert float(mtp_working_set(p, {**point, "recompute": Recompute.NONE})) == 0


def test_the_projection_takes_its_flops() -> None:
    """6 * tokens * 2h * h FLOPs at the peak are a lower bound, and half a dozen times as much is none."""
    shape = model(mtp_layers=1, hidden_size=8192, num_heads=128)
    p = problem(shape=shape, seq_len=8192).instance(16, Splits((), ()))
    point = {"tp": 1, "cp": 1, "mbs": 4, "recompute": Recompute.NONE}
    ideal = 6 * 4 * 8192 * 2 * 8192**2 / p.matmul_peak
    plain = float(multi_token.mtp_projection(p, point))
    assert ideal < plain < 2 * ideal
    again = float(multi_token.mtp_projection(p, {**point, "recompute": Recompute.FULL}))
    assert again == pytest.approx(4 / 3 * plain, rel=0.02)


def test_traffic_of_the_projection_in_passes_of_an_activation() -> None:
    point = {"tp": 2, "cp": 1, "mbs": 1}
    for parallel, plain, again in ((True, 6, 9), (False, 5, 6)):
        p = problem(sequence_parallel=parallel).instance(16, Splits((), ()))
        one = float(tensor_comm.activation_pass(p, **point))
        assert float(multi_token.mtp_tensor_comm(p, {**point, "recompute": 0})) == pytest.approx(plain * one)
        assert float(multi_token.mtp_tensor_comm(p, {**point, "recompute": 2})) == pytest.approx(again * one)
        assert float(multi_token.mtp_tensor_comm(p, {**point, "tp": 1, "recompute": 0})) == 0


@pytest.mark.parametrize("modules", [1, 3])
def test_time_of_a_module_is_a_layer_a_head_and_a_projection(modules: int) -> None:
    trained = problem(mtp_layers=modules)
    plan = config(trained, pp=2, recompute=Recompute.FULL)
    p = instance_for(trained, plan.layers_per_stage, 16)
    values = {axis: np.array([value]) for axis, value in {**plan.axes(), "split": 0}.items()}
    of = step_time.items(p, values).row(0)
    bare = replace_workload(trained, mtp_layers=0)
    plain = step_time.items(instance_for(bare, plan.layers_per_stage, 16), values).row(0)
    own = sum(float(t(p, values)[0]) for t in step_time.MTP_TERMS)
    for way, share in enumerate((1 / 4, 3 / 4)):  # recomputed: of four forward-equivalents
        module = plain.dense[way] + own * share + plain.embedding[way] + plain.head[way]
        assert of.head[way] == pytest.approx(plain.head[way] + modules * module)
    times = step_time.pass_times(of, np.array([8.0, 8.0]), np.zeros(2))
    assert times.forward[1] - times.forward[0] == pytest.approx(of.head[0] - of.embedding[0])


@pytest.mark.parametrize(("vpp", "modules"), [(1, 1), (2, 2)])
def test_modules_apart_leave_the_output_layer_its_passes_and_a_hidden_state_more(vpp: int, modules: int) -> None:
    """Layer, projection and look-up on the stage before; the last waits for what they put out, once each way.

    Every transfer waits for an exchange of sizes: none is hidden.
    """
    trained = problem("h100-sxm:1x4", mtp_layers=modules)
    beside = config(trained, pp=4, vpp=vpp)
    apart = replace(beside, mtp_apart=True)
    p, q = instance_of(trained, beside), instance_of(trained, apart)
    values = {axis: np.array([value]) for axis, value in {**beside.axes(), "split": 0}.items()}
    one, two = step_time.items(p, values).row(0), step_time.items(q, values).row(0)
    bare = step_time.items(instance_of(replace_workload(trained, mtp_layers=0), beside), values).row(0)
    assert two.delay == 0
    sizes = float(pipeline_comm.shape_exchange(p, values))
    assert two.transfer == pytest.approx(one.transfer + one.delay + sizes / 2)
    sent = one.transfer + one.delay - sizes / 2  # a message without its latency
    for way in (0, 1):
        assert one.apart[way] == 0
        assert two.head[way] == pytest.approx((1 + modules) * bare.head[way] + modules * sent)
        assert two.head[way] + two.apart[way] == pytest.approx(one.head[way] + modules * sent)
    times = step_time.pass_times(two, np.full(4 * vpp, 4.0 / vpp), np.zeros(4 * vpp))
    assert times.forward[-2] - times.forward[-3] == pytest.approx(two.apart[0])
    assert times.forward[-1] - times.forward[-3] == pytest.approx(two.head[0])
    lines = estimate(q, apart).terms_s
    assert lines["mtp"] > 0
    total = sum(amount for name, amount in lines.items() if name not in ("dp_comm", "optimizer", "fixed"))
    assert total == pytest.approx(makespan(*step_time.schedule_of(q, values, step_time.items(q, values), 0)))


def test_modules_apart_hold_states_embedding_and_activations_where_they_are() -> None:
    trained = problem("h100-sxm:1x4", mtp_layers=2)
    plan = config(trained, pp=4)
    beside, apart = (memories_of(trained, replace(plan, mtp_apart=where)) for where in (False, True))
    assert apart[:2] == beside[:2]
    own = 2 * (2 * (OWN + LAYER) + VOCAB * HIDDEN)
    assert beside[3]["parameters"] - apart[3]["parameters"] == pytest.approx(own)
    assert apart[2]["parameters"] - beside[2]["parameters"] == pytest.approx(own)
    assert apart[3]["logits"] == beside[3]["logits"] > apart[2]["logits"] == 0
    module = beside[3]["activations"] - apart[3]["activations"]
    assert apart[2]["activations"] - beside[2]["activations"] == pytest.approx(2 * module), "1F1B: two in flight"


@pytest.mark.parametrize("seed", range(40))
def test_microbatches_in_flight_on_the_stage_before_the_last(seed: int) -> None:
    """A layer on that stage alone, simulated pass by pass."""
    rng = random.Random(seed)
    pp, vpp = rng.choice([3, 4, 5, 8]), rng.choice([1, 2, 3])
    m = pp * rng.randint(1, 5) if vpp > 1 else rng.randint(1, 20)
    layers = [[0] * vpp for _ in range(pp)]
    layers[pp - 2][-1] = 1
    ones = [[1.0] * vpp for _ in range(pp)]
    depth = min(m, int(saturated(pp, vpp)))
    assert held_before_last(pp, vpp, depth) == simulate(ones, ones, m, layers=layers).layers[pp - 2]


def test_modules_apart_that_are_rebuilt_have_no_logits_to_replace() -> None:
    """Recomputed as a whole: the layer's activations come on top of what is kept, on their rank and not on the last."""
    trained = problem("h100-sxm:1x4", shape=model(mtp_layers=1, vocab_size=256000))
    plan = config(trained, pp=4, recompute=Recompute.FULL)
    beside, apart = (memories_of(trained, replace(plan, mtp_apart=where)) for where in (False, True))
    gone = beside[3]["activations"] - apart[3]["activations"]
    assert apart[2]["activations"] - beside[2]["activations"] > 2 * gone


def test_the_breakdown_names_the_modules() -> None:
    """On the critical stage, once a microbatch each; the lines still add up to the schedule's length."""
    trained = problem(mtp_layers=2)
    plan = config(trained, pp=2)
    p = instance_for(trained, plan.layers_per_stage, 16)
    figures = estimate(p, plan)
    values = {axis: np.array([value]) for axis, value in {**plan.axes(), "split": 0}.items()}
    of = step_time.items(p, values)
    bare = replace_workload(trained, mtp_layers=0)
    plain = step_time.items(instance_for(bare, plan.layers_per_stage, 16), values)
    added = sum(float(a[0] - b[0]) for a, b in zip(of.head, plain.head, strict=True))
    assert figures.terms_s["mtp"] == pytest.approx(plan.grad_acc * added)
    lines = sum(amount for name, amount in figures.terms_s.items() if name not in ("dp_comm", "optimizer", "fixed"))
    assert lines == pytest.approx(makespan(*step_time.schedule_of(p, values, of, 0)) + figures.terms_s["gather_comm"])


def test_the_embeddings_copies_are_reduced_together() -> None:
    """Megatron-Core, finalize_model_grads.py: as for tied embeddings, which need it once only."""
    point = {"tp": 1}
    untied, tied = (problem(shape=model(mtp_layers=1, tied_embeddings=tied)) for tied in (False, True))
    one = [float(data_comm.tied_embedding_reduction(p.instance(16, Splits((), ())), point)) for p in (untied, tied)]
    assert one[0] == one[1] > 0
    plain = problem(mtp_layers=0).instance(16, Splits((), ()))
    assert float(data_comm.tied_embedding_reduction(plain, point)) == 0
    reductions = [q for q in time_tree(tied.instance(16, Splits((), ()))) if q.name == "dp_comm"]
    assert len(reductions) == 2, "data-parallel traffic and one all-reduce of the embedding"


def test_model_flops_as_megatron_counts_them() -> None:
    """training.py, num_floating_point_operations: a layer, three norms' worth left out, 2h*h, another output layer."""
    trained, plain = (problem(mtp_layers=n).instance(16, Splits((), ())) for n in (2, 0))
    matrices = ATTENTION + 3 * HIDDEN * 4096 + 2 * HIDDEN**2 + VOCAB * HIDDEN
    attention = 12 * 16 * 64 * TOKENS
    full, causal = (a - b for a, b in zip(model_flops_per_token(trained), model_flops_per_token(plain), strict=True))
    assert full == pytest.approx(2 * (6 * matrices + attention))
    assert causal == pytest.approx(2 * (6 * matrices + attention / 2))


def test_only_problems_that_train_modules_have_their_parts() -> None:
    p = problem(mtp_layers=0).instance(16, Splits((), ()))
    names = {part.term.name for quantity in time_tree(p) for part in quantity.parts}
    assert not any(name.startswith("mtp") for name in names)
    assert "mtp" not in estimate(plan_instance(p.problem, config(p.problem, pp=2)), config(p.problem, pp=2)).terms_s


@pytest.mark.parametrize(
    ("changes", "modules"),
    [
        ({}, 1),
        ({"framework": "nemo"}, 1),
        ({"framework_version": "0.14"}, 1),
        ({"framework_version": "0.13"}, 0),
        ({"framework": "generic"}, 0),
        ({"framework": "torchtitan"}, 0),
        ({"mtp_layers": 3}, 3),
        ({"mtp_layers": 0}, 0),
        ({"framework": "generic", "mtp_layers": 2}, 2),
    ],
)
def test_who_trains_how_many(changes: dict[str, Any], modules: int) -> None:
    p = problem(**changes)
    assert p.mtp_layers == modules
    words = " ".join(assumptions(p))
    assert ("are trained" in words) is bool(modules) and ("not trained" in words) is not bool(modules)


def test_learned_positions_have_no_modules() -> None:
    shape = model(mtp_layers=1, position="learned", max_positions=8192)
    assert problem(shape=shape).mtp_layers == 0
    assert "mtp_positions" in {v.rule for v in parsolve.check(problem(shape=shape, mtp_layers=1), "tp=1")}


def test_launch_lines() -> None:
    trained = problem(mtp_layers=2)
    line = options(launch("megatron", trained, config(trained, pp=2)))
    assert line["--mtp-num-layers"] == ["2"] and line["--mtp-loss-scaling-factor"] == ["0.1"]
    plan = config(trained, pp=2, layers_per_stage=((16,), (0,)))
    assert options(launch("megatron", trained, plan))["--pipeline-model-parallel-layout"] == ["Et*16|m*2L"]
    assert layout_text([3, 2, 0], 1) == "Et*3|t*2|mL"
    assert layout_text([3, 2, 1, 0], 2, apart=True) == "Et*3|t*2|tm*2|L"
    four = problem("h100-sxm:1x4", mtp_layers=1)
    plan = config(four, pp=4, layers_per_stage=((6,), (5,), (5,), (0,)), mtp_apart=True)
    assert options(launch("megatron", four, plan))["--pipeline-model-parallel-layout"] == ["Et*6|t*5|t*5m|L"]
    bridge = problem(framework="nemo", shape=load_model_preset("deepseek-v3"), cluster="h100-sxm:4x8")
    words = launch("nemo", bridge, config(bridge, ep=8, etp=1)).argv
    assert "model.mtp_num_layers=1" in words and "model.mtp_loss_scaling_factor=0.1" in words


def test_a_plan_with_modules_is_not_printed_for_who_cannot_train_them() -> None:
    trained = problem()
    with pytest.raises(NotExpressibleError, match="--mtp-layers 0"):
        launch("torchtitan", trained, config(trained, zero=3))
    left_out = problem(mtp_layers=0)
    assert any("left out" in note for note in launch("torchtitan", left_out, config(left_out, zero=3)).notes)
    titan = problem(framework="torchtitan")
    line = launch("megatron", titan, config(titan, zero=0))
    assert "--mtp-num-layers" not in line.argv and any("left out" in note for note in line.notes)


LINE = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 --position-embedding-type rope "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 16 --bf16 "
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "
)


def test_lines_of_today_say_what_is_trained() -> None:
    cluster = problem().cluster
    today = read_megatron(LINE + "'Et*3|tmL' --mtp-num-layers 1", cluster, None, (0, 19))
    assert today.fields["mtp_layers"] == 1 and today.model is not None and today.model.mtp_layers == 1
    assert today.config["layers_per_stage"] == [[3], [1]] and not today.notes
    on_the_first_rank = read_megatron(LINE + "'Et*2|t*2|m|L' --mtp-num-layers 1", cluster, None, (0, 19))
    assert any("stage 3 of 4" in note for note in on_the_first_rank.notes)
    assert not on_the_first_rank.config["mtp_apart"]
    line = (LINE + "'Et*2|t|tm|L' --mtp-num-layers 1").replace("parallel-size 2", "parallel-size 4")
    four = Problem("h100-sxm:1x4", model(), seq_len=TOKENS, gbs=16).cluster
    apart = read_megatron(line, four, None, (0, 19))
    assert apart.config["mtp_apart"] and not apart.notes
    (plan,) = check_result(Problem(four, apart.model, seq_len=TOKENS, gbs=16, mtp_layers=1), apart.config).plans
    assert not plan.violations and plan.config.mtp_apart
    assert "'Et*2|t|tm|L'" in plan.args("megatron")
    with pytest.raises(SpecError, match=r"0\.16"):
        read_megatron(LINE + "'Et*2|t*2|m|L' --mtp-num-layers 1", cluster, None, (0, 15))
    assert (
        read_megatron(LINE + "'Et*3|tL'", cluster, model(num_layers=4, mtp_layers=1), (0, 19)).fields["mtp_layers"] == 0
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et*3|tL", "--mtp-num-layers is 1"),
        ("Et*2m|t*2L", "behind"),
        ("Et*3|tm*2L", "2 m"),
        ("Et*3m|m|t|L", "2 m"),
        ("t*3|tmL", "one E"),
        ("Et*3L|tm", "one L"),
        ("Et*3|tmLL", "one L"),
        ("Et*3|tEmL", "one E"),
    ],
)
def test_layouts_that_megatron_refuses(layout: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_megatron(LINE + f"'{layout}' --mtp-num-layers 1", problem().cluster, None, (0, 19))


def test_modules_on_two_stages_are_refused() -> None:
    with pytest.raises(SpecError, match="several stages"):
        read_megatron(LINE + "'Et*3|t|m|mL' --mtp-num-layers 2", problem().cluster, None, (0, 19))


def test_stages_show_the_modules() -> None:
    trained = problem(mtp_layers=2)
    stages = check_result(trained, config(trained, pp=2)).plans[0].to_json()["stages"]
    assert [stage.get("mtp_layers") for stage in stages] == [None, 2]
    four = problem("h100-sxm:1x4", mtp_layers=2)
    plan = check_result(four, config(four, pp=4, mtp_apart=True)).plans[0].to_json()
    assert [stage.get("mtp_layers") for stage in plan["stages"]] == [None, None, 2, None]
    assert Config.from_json(plan["config"]) == config(four, pp=4, mtp_apart=True)
    assert not Config.from_json({k: v for k, v in plan["config"].items() if k != "mtp_apart"}).mtp_apart
    command = ["check", "h100-sxm:32x8", "deepseek-v3", "--seq-len", "4096", "--gbs", "1024"]
    where = "pp=16,tp=1,ep=16,etp=1,zero=1,recompute=full,mbs=1,layers_per_stage=4*15|1"
    apart = where.replace("4*15|1", "4*14|5|0") + ",mtp_apart=true"
    elsewhere = CliRunner().invoke(main, [*command, "--config", apart])
    assert "no layers on the output layer's stage" not in " ".join(elsewhere.output.split())
    assert "4*14|5|0 + 1 MTP on the last but one" in elsewhere.output and ",mtp_apart=true" in elsewhere.output
    behind = CliRunner().invoke(main, [*command, "--config", where + ",mtp_apart=true"])
    assert behind.exit_code == 1 and "no layers on the output layer's stage" in " ".join(behind.output.split())
    refused = CliRunner().invoke(main, [*command, "--config", "pp=2,mtp_apart=true"])
    assert refused.exit_code == 2 and "pp of 3 or more" in refused.output
    wrong = CliRunner().invoke(main, [*command, "--config", "pp=4,mtp_apart=perhaps"])
    assert wrong.exit_code == 2 and "mtp_apart takes true or false" in wrong.output
    spelt = CliRunner().invoke(main, [*command, "--config", apart.replace("mtp_apart", "MTP-Apart")])
    assert spelt.output == elsewhere.output
    command += ["--config", where]
    shown = CliRunner().invoke(main, command)
    assert "1 + 1 MTP" in shown.output and "layers per stage: 4*15|1 + 1 MTP" in shown.output
    data = json.loads(CliRunner().invoke(main, [*command, "--json", "-q"]).stdout)
    assert data["plans"][0]["stages"][-1]["mtp_layers"] == 1 and data["problem"]["workload"]["mtp_layers"] is None
    bare = CliRunner().invoke(main, [*command, "--mtp-layers", "0"])
    assert "MTP" not in bare.output and "not trained" in bare.output
    assert CliRunner().invoke(main, [*command, "--mtp-layers", "some"]).exit_code == 2


@pytest.mark.parametrize("cluster", ["h800-sxm:32x8", "h800-sxm:256x8"])
def test_deepseek_v3_with_its_module_is_solved(cluster: str) -> None:
    trained = Problem(cluster, "deepseek-v3", seq_len=4096, gbs=15360)
    with_it = parsolve.solve(trained, top=1)
    without = parsolve.solve(replace_workload(trained, mtp_layers=0), top=1)
    assert with_it.status == without.status == "optimal"
    ratio = with_it.best.estimate.step_time_s / without.best.estimate.step_time_s
    assert 1.0 < ratio < 1.15, "1/61 of the layers and an output layer's 2.5 % of the FLOPs, twice with imbalance"
