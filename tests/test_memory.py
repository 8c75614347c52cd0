"""Memory against hand-worked values."""

from __future__ import annotations

import pytest

import parsolve
from parsolve import Problem
from parsolve.api import check_result, make_plan, plan_instance
from parsolve.constraints.memory import _bytes_per_parameter
from parsolve.evaluation import instance_for, stage_memories
from parsolve.reading import parse_config
from parsolve.splits import Splits


def parts(problem: Problem, config: str) -> list[dict[str, float]]:
    full, _ = parse_config(config, problem)
    return [s.parts for s in stage_memories(instance_for(problem, full.layers_per_stage, full.gbs), full)]


def test_bytes_per_parameter() -> None:
    """Megatron with fp32 main gradients: 18; distributed optimizer: 6 + 12/shards."""
    problem = Problem("h100-sxm:4x8", "llama2-7b", seq_len=4096, gbs=64)
    p = problem.instance(64, Splits((), ()))
    assert sum(float(x) for x in _bytes_per_parameter(p, 0, 8)) == 18
    assert sum(float(x) for x in _bytes_per_parameter(p, 1, 8)) == 6 + 12 / 8
    assert sum(float(x) for x in _bytes_per_parameter(p, 3, 8)) == 18 / 8
    generic = Problem("h100-sxm:4x8", "llama2-7b", seq_len=4096, gbs=64, framework="generic")
    q = generic.instance(64, Splits((), ()))
    assert [float(x) for x in _bytes_per_parameter(q, 2, 4)] == [2, 2 / 4, 12 / 4]


def test_states_of_llama2_7b_on_one_gpu() -> None:
    problem = Problem("h100-sxm:1x1", "llama2-7b", seq_len=4096, gbs=1)
    (stage,) = parts(problem, "tp=1")
    states = stage["parameters"] + stage["gradients"] + stage["optimizer"]
    assert states == pytest.approx(18 * 6_738_415_616, rel=1e-9)


def test_experts_are_sharded_over_their_own_data_parallel_ranks() -> None:
    """Qwen3-30B-A3B, ep 8 on 8 GPUs: edp = 1, so the experts' 12 bytes stay whole: 76.8 GB of states."""
    problem = Problem("h100-sxm:1x8", "qwen3-30b-a3b", seq_len=4096, gbs=64)
    (stage,) = parts(problem, "tp=1,ep=8,etp=1,zero=1")
    states = stage["parameters"] + stage["gradients"] + stage["optimizer"]
    assert states / 1e9 == pytest.approx(76.8, abs=0.1)
    assert any(v.rule == "memory" for v in parsolve.check(problem, "tp=1,ep=8,etp=1,zero=1,recompute=full"))


def test_experts_over_sixteen_gpus() -> None:
    """ep 16 halves the experts of a rank: 43 GB of states, and it fits."""
    problem = Problem("h100-sxm:2x8", "qwen3-30b-a3b", seq_len=4096, gbs=64)
    config = "tp=1,ep=16,etp=1,zero=1,recompute=full"
    (stage,) = parts(problem, config)
    states = stage["parameters"] + stage["gradients"] + stage["optimizer"]
    assert states / 1e9 == pytest.approx(43.0, abs=0.6)
    assert parsolve.check(problem, config) == []


def test_expert_optimizer_divides_by_edp() -> None:
    problem = Problem("h100-sxm:4x8", "qwen3-30b-a3b", seq_len=4096, gbs=64)
    (four,) = parts(problem, "tp=1,ep=8,etp=1,zero=1")
    (zero,) = parts(problem, "tp=1,ep=8,etp=1,zero=0")
    model = problem.model
    expert, dense = model.routed_expert_params / 8, model.num_params - model.routed_expert_params
    assert zero["optimizer"] == pytest.approx(12 * (expert + dense), rel=1e-6)
    assert four["optimizer"] == pytest.approx(12 * (expert / 4 + dense / 32), rel=1e-6)


def test_states_are_divided_by_tp_and_pp() -> None:
    problem = Problem("h100-sxm:16x8", "llama2-70b", seq_len=4096, gbs=1024)
    stages = parts(problem, "tp=8,pp=4,zero=1")
    model = problem.model
    middle = 20 * (model.dense_layer_params - 2 * model.hidden_size) / 8 + 20 * 2 * model.hidden_size
    assert stages[1]["parameters"] == pytest.approx(2 * middle, rel=1e-6)
    assert stages[1]["optimizer"] == pytest.approx(12 * middle / 4, rel=1e-6)


def test_the_tied_embedding_has_a_copy_on_both_ends() -> None:
    problem = Problem("h100-sxm:1x8", "examples/model.toml", seq_len=4096, gbs=64)
    (alone,) = parts(problem, "pp=1,tp=1")
    ends = parts(problem, "pp=2,tp=1")
    embedding = problem.model.vocab_size * problem.model.hidden_size
    both = sum(stage["parameters"] for stage in (ends[0], ends[-1]))
    assert both - alone["parameters"] == pytest.approx(2 * embedding, rel=1e-3)


def test_logits_of_a_large_vocabulary() -> None:
    """mbs 4, sequence 4096, vocabulary 128k: 4.2e9 bytes of 16-bit logits, an eighth of it at tp 8."""
    problem = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=4096, gbs=64)
    (whole,) = parts(problem, "tp=1,mbs=4")
    (eighth,) = parts(problem, "tp=8,mbs=4")
    assert whole["logits"] >= 4 * 4096 * 128256 * 2
    assert whole["logits"] / eighth["logits"] == pytest.approx(8, rel=0.01)


def test_parts_add_up_to_the_total() -> None:
    problem = Problem("h100-sxm:8x8", "mixtral-8x7b", seq_len=4096, gbs=256)
    plan = make_plan(problem, parse_config("tp=2,pp=2,ep=8,etp=1,zero=1", problem)[0])
    memory = plan.estimate.memory_bytes
    assert sum(v for k, v in memory.items() if k not in ("total", "limit")) == memory["total"]
    assert sum(plan.estimate.terms_s.values()) == pytest.approx(plan.estimate.step_time_s, rel=1e-12)


@pytest.mark.parametrize("text", ["pp=4,vpp=2,tp=2", "pp=8,tp=1,layers_per_stage=3|5*5|4|0", "pp=1,tp=4"])
def test_every_rank_has_a_row_and_the_worst_is_the_estimates(text: str) -> None:
    given = Problem("h100-sxm:2x8", "llama3.1-8b", seq_len=4096, gbs=64)
    plan = check_result(given, f"{text},mbs=1,zero=1").plans[0]
    rows = plan.to_json()["stages"]
    assert [row["rank"] for row in rows] == list(range(plan.config.pp))
    assert [tuple(row["layers"]) for row in rows] == list(plan.config.layers_per_stage)
    for row in rows:
        parts = {k: v for k, v in row["memory_bytes"].items() if k not in ("total", "limit")}
        assert sum(parts.values()) == row["memory_bytes"]["total"]
        assert (parts["logits"] > 0) == (row["rank"] == plan.config.pp - 1)
    worst = plan.estimate.worst_stage
    assert rows[worst]["memory_bytes"] == plan.estimate.memory_bytes
    assert max(row["memory_bytes"]["total"] for row in rows) == plan.estimate.memory_bytes["total"]
    few = {stage.rank: stage for stage in stage_memories(plan_instance(given, plan.config), plan.config)}
    assert all(plan.stages[rank] == stage for rank, stage in few.items())


def test_the_reserve_lowers_the_limit() -> None:
    problem = Problem("h100-sxm:1x8", "llama2-7b", seq_len=4096, gbs=64, memory_reserve="6GiB")
    plan = make_plan(problem, parse_config("tp=2", problem)[0])
    assert plan.estimate.memory_bytes["limit"] == problem.cluster.gpu.memory_bytes - 6 * 2**30


def test_parameters_of_a_rank_equal_megatron_core() -> None:
    """Qwen3-235B, tp 8 over 4 kv heads, pp 2, ep 8: parameters on each pipeline rank of the real GPTModel (0.19.2)."""
    problem = Problem("h100-sxm:2x8", "qwen3-235b-a22b", seq_len=4096, gbs=64, without={"memory"})
    stages = parts(problem, "tp=8,pp=2,etp=1,ep=8,zero=0")
    assert [round(stage["parameters"] / 2) for stage in stages] == [14_715_588_352, 14_715_592_448]
