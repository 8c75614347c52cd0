"""Each rule: a legal and an illegal point, with the rule's name."""

from __future__ import annotations

from typing import Any

import pytest

import parsolve
from parsolve import Problem
from parsolve.constraints import RULES
from parsolve.restrictions import restrict
from parsolve.specs import Recompute


def broken(problem: Problem, config: str | dict[str, Any]) -> set[str]:
    return {violation.rule for violation in parsolve.check(problem, config)}


def dense(**options: Any) -> Problem:
    """A 13B-like model on 2x8 GPUs, easily changed."""
    shape = {
        "name": "dense",
        "num_layers": 40,
        "hidden_size": 5120,
        "ffn_size": 13824,
        "num_heads": 40,
        "num_kv_heads": 40,
        "head_dim": 128,
        "vocab_size": 32000,
    }
    shape |= options.pop("model", {})
    workload = {"seq_len": 4096, "gbs": 64, **options}
    return Problem(workload.pop("cluster", "h100-sxm:2x8"), parsolve.Model.read(shape, "test"), **workload)


def moe(**options: Any) -> Problem:
    options.setdefault("cluster", "h100-sxm:8x8")
    return Problem(options.pop("cluster"), options.pop("model", "qwen3-30b-a3b"), seq_len=4096, gbs=256, **options)


GQA = {"num_heads": 64, "num_kv_heads": 2, "hidden_size": 8192}
TITAN = {"framework": "torchtitan", "model": {"qk_norm": "head"}}
EMPTY_LAST = "pp=4,layers_per_stage=14|13|13|0"
CASES: list[tuple[str, Problem, str, str | Problem]] = [
    # rule, problem, legal config, illegal config or a problem in which the legal one is illegal
    ("world_size", dense(), "tp=2,pp=2", "tp=2,pp=2,dp=2"),
    ("expert_world_size", moe(), "tp=2,ep=8,etp=1", "tp=2,ep=8,etp=1,edp=3"),
    ("global_batch", dense(), "mbs=2", "mbs=3"),
    ("attention_heads", dense(cluster="h100-sxm:16x8"), "tp=4", "tp=16"),
    ("kv_heads", dense(model=GQA, framework_version="0.15"), "tp=2", "tp=8"),
    ("mlp_width", dense(model={"ffn_size": 13826}), "tp=2", "tp=4"),
    ("tp_in_domain", dense(), "tp=8", "tp=10"),
    ("sequence_shards", dense(seq_len=4098), "tp=2", "tp=4"),
    ("balanced_chunks", dense(seq_len=4100), "cp=2,tp=1", "cp=8,tp=1"),
    ("sequence_chunks", dense(seq_len=4100, framework="generic"), "cp=2", "cp=8"),
    ("experts_exist", dense(), "tp=2", "tp=2,ep=2"),
    ("dense_expert_grid", dense(), "tp=2", "tp=2,etp=1"),
    ("experts_divide", moe(), "ep=16,etp=1,tp=1", "ep=12,etp=1,tp=1"),
    ("enough_layers", dense(), "pp=2,vpp=21", "pp=2,vpp=22"),
    ("layers_divide", dense(), "pp=8", "pp=16"),
    ("microbatch_group", dense(gbs=56), "pp=4,vpp=1,tp=2", "pp=4,vpp=2,tp=2,mbs=4"),
    ("not_all_recomputed", dense(), "recompute=block,recompute_layers=9", "pp=4,recompute=block,recompute_layers=10"),
    ("block_recomputation", dense(framework="torchtitan"), "recompute=full", "recompute=block,recompute_layers=1"),
    (
        "block_schedule",
        dense(framework="generic"),
        "recompute=block,recompute_layers=1",
        dense(framework="generic", schedule="zero-bubble"),
    ),
    ("chunks_need_pipeline", dense(), "pp=1", "pp=1,vpp=2"),
    ("zero_needs_shards", dense(), "tp=8,pp=2,zero=0", "tp=8,pp=2,zero=1"),
    ("fsdp_with_pipeline", dense(), "pp=1,zero=3", "pp=2,zero=3"),
    ("fsdp_since", dense(framework_version="0.13"), "zero=1", "zero=2"),
    ("zero_with_pipeline", dense(framework="deepspeed"), "pp=2,zero=1", "pp=2,zero=2"),
    ("no_virtual_stages", dense(framework="deepspeed"), "pp=2", "pp=2,vpp=2"),
    ("gpipe_one_chunk", dense(framework="generic", schedule="gpipe"), "pp=2", "pp=2,vpp=2"),
    ("gpipe_launcher", dense(schedule="gpipe"), "pp=1", "pp=2"),
    ("split_backward_launcher", dense(schedule="zero-bubble"), "pp=1", "pp=2"),
    ("split_backward_launcher", dense(schedule="zbv", framework="nemo"), "pp=1", "pp=2,vpp=2"),
    ("split_backward_launcher", dense(schedule="dualpipev", framework="deepspeed"), "pp=1", "pp=2,vpp=2"),
    ("two_stages_in_a_v", dense(schedule="zbv", **TITAN), "pp=2,vpp=2,zero=1", "pp=2,zero=1"),
    ("two_stages_in_a_v", dense(schedule="dualpipev", **TITAN), "pp=2,vpp=2,zero=1", "pp=2,vpp=4,zero=1"),
    ("zero_bubble_groups", dense(schedule="zero-bubble", gbs=20, **TITAN), "pp=4,tp=2,grad_acc=10", "pp=4,grad_acc=9"),
    ("dualpipev_depth", dense(schedule="dualpipev", **TITAN), "pp=4,vpp=2,mbs=2", "pp=4,vpp=2,mbs=4"),
    ("torch_1f1b_depth", dense(**TITAN), "pp=8,tp=2,mbs=8", "pp=8,tp=2,mbs=16"),
    ("split_backward_recompute", dense(schedule="zbv", **TITAN), "pp=2,vpp=2", "pp=2,vpp=2,recompute=full"),
    ("split_backward_compiled", dense(schedule="zbv", precision="fp8", **TITAN), "pp=1", "pp=2,vpp=2"),
    ("ulysses_alone", dense(framework="deepspeed"), "cp=8", "cp=2,tp=2"),
    ("ulysses_heads", dense(framework="deepspeed"), "cp=8", "cp=16"),
    ("zero_with_experts", moe(model="mixtral-8x7b", framework="deepspeed"), "zero=2", "zero=3"),
    ("deepspeed_expert_grid", moe(model="mixtral-8x7b", framework="deepspeed"), "tp=2", "tp=2,etp=1"),
    ("experts_in_data_parallel", moe(model="mixtral-8x7b", framework="deepspeed"), "tp=8,ep=8", "tp=8,pp=4,ep=4,dp=2"),
    ("moe_sequence_parallel", moe(sequence_parallel=False), "tp=1,etp=1", "tp=2,etp=1"),
    ("expert_width", moe(), "etp=8,tp=8", "etp=7,tp=8"),
    ("etp_in_domain", moe(), "etp=8,tp=8", "etp=16,tp=8"),
    ("expert_bias", moe(model="gpt-oss-20b"), "etp=1,tp=8", "etp=2,tp=8"),
    ("hidden_width", dense(model={"hidden_size": 5122}), "tp=2", "tp=4"),
    ("memory", dense(), "tp=8,pp=2", "tp=1,pp=1"),
    ("token_target", dense(gbs=None, gbs_tokens=1_000_000), "grad_acc=16", "grad_acc=17"),
    ("zero_alone", moe(model="qwen3-30b-a3b", framework="deepspeed"), "zero=2", "zero=2,tp=2"),
    ("auto_tp_stages", dense(framework="deepspeed", model={"qk_norm": "head"}), "zero=2,tp=2", "zero=3,tp=2"),
    ("whole_layers", dense(framework="deepspeed"), "recompute=full", "recompute=selective"),
    ("deepspeed_precision", dense(framework="deepspeed"), "zero=1", dense(framework="deepspeed", precision="fp8")),
    ("fsdp_stages", dense(framework="torchtitan"), "zero=3", "zero=1"),
    ("fsdp_stages", dense(framework="torchtitan"), "zero=1,pp=2", "zero=2,pp=2"),
    ("context_shards", dense(framework="torchtitan"), "zero=2,cp=2", "zero=0,cp=2"),
    ("borrowed_experts", moe(framework="torchtitan"), "zero=3,tp=2,ep=8,etp=1", "zero=3,tp=2,ep=8,etp=2"),
    ("experts_in_shards", moe(framework="torchtitan"), "zero=0,tp=4,ep=4,etp=1", "zero=0,tp=4,ep=8,etp=1"),
    ("tied_pipeline", dense(framework="torchtitan", model={"tied_embeddings": True}), "pp=1", "pp=2"),
    ("fsdp_recompute", dense(framework="accelerate"), "recompute=full", "recompute=selective"),
    ("fsdp_precision", dense(framework="torchtitan", precision="fp8"), "zero=3", dense(**TITAN, precision="fp16")),
    ("fsdp_precision", dense(framework="accelerate"), "zero=3", dense(framework="accelerate", precision="fp8")),
    ("fsdp_optimizer", dense(framework="torchtitan"), "zero=3", dense(framework="torchtitan", optimizer="sgd")),
    ("torchtitan_family", dense(**TITAN), "zero=3", dense(framework="torchtitan", model={"qkv_bias": True})),
    ("data_parallel_alone", dense(framework="accelerate"), "zero=3", "tp=2,zero=3"),
    ("sharded_optimizer", dense(optimizer="sgd"), "zero=0", "zero=1"),
    ("context_needs_fused_attention", dense(cluster="v100-sxm-32gb:2x8", precision="fp16"), "cp=1", "cp=2"),
    ("sinks_exchange_heads", moe(model="gpt-oss-20b"), "tp=1,etp=1,cp=2", "tp=8,etp=1,cp=2"),
    ("shard_group_divides", dense(shard_group=8), "zero=1", dense(shard_group=3)),
    ("shard_group_holds_experts", moe(framework="generic", shard_group=4), "zero=3,ep=4", "zero=3,ep=16"),
    ("optimizer_instances", dense(shard_group=4), "zero=1", "zero=3"),
    ("secondary_partition", dense(framework="deepspeed", shard_group=8), "zero=3", "zero=2"),
    ("quantised_traffic", dense(framework="deepspeed", zero_quantized="both"), "zero=3", "zero=2"),
    ("context_in_shard_group", dense(framework="torchtitan", shard_group=2), "zero=3,cp=2", "zero=3,cp=4"),
    ("light_modules", moe(), "recompute=light", dense()),
    ("mtp_launcher", dense(framework="deepspeed", mtp_layers=0), "zero=1", dense(framework="deepspeed", mtp_layers=1)),
    ("mtp_since", dense(framework_version="0.14", mtp_layers=1), "pp=2", dense(framework_version="0.13", mtp_layers=1)),
    ("mtp_positions", dense(mtp_layers=1), "pp=2", dense(model={"position": "alibi"}, mtp_layers=1)),
    (
        "mtp_schedule",
        dense(framework="generic", mtp_layers=1),
        "pp=2",
        dense(framework="generic", mtp_layers=1, schedule="zero-bubble"),
    ),
    ("mtp_apart", dense(mtp_layers=1), EMPTY_LAST + ",mtp_apart=true", dense(mtp_layers=0)),
    ("mtp_apart", dense(mtp_layers=1), EMPTY_LAST + ",mtp_apart=true", dense(mtp_layers=1, framework_version="0.15")),
    ("mtp_apart", dense(mtp_layers=1), EMPTY_LAST + ",mtp_apart=true", "pp=4,mtp_apart=true"),
    ("mtp_apart", dense(mtp_layers=1), EMPTY_LAST + ",mtp_apart=yes", dense(mtp_layers=1, framework="generic")),
    ("batch_range", dense(gbs=64, gbs_tolerance=0.1), "grad_acc=4", "grad_acc=8"),
]


@pytest.mark.parametrize(("rule", "problem", "legal", "illegal"), CASES, ids=[case[0] for case in CASES])
def test_rule(rule: str, problem: Problem, legal: str, illegal: str | Problem) -> None:
    assert rule not in broken(problem, legal)
    if isinstance(illegal, Problem):
        problem, illegal = illegal, legal
    assert rule in broken(problem, illegal)


@pytest.mark.parametrize(("config", "name"), [("recompute=full", "full"), ("recompute=selective", "selective")])
def test_messages_name_the_kind_of_recomputation(config: str, name: str) -> None:
    pinned = restrict(dense(), pin={"recompute": "none"})
    (found,) = (v for v in parsolve.check(pinned, config) if v.rule.startswith("pin"))
    assert found.message == f"pin recompute=none excludes recompute={name}"
    assert f"{Recompute.FULL}" == "full" and f"{Recompute.FULL:d}" == "2"


@pytest.mark.parametrize("config", ["recompute=block", "recompute=full,recompute_layers=3", "recompute_layers=1"])
def test_recomputed_layers_go_with_block_alone(config: str) -> None:
    with pytest.raises(parsolve.SpecError, match="recompute=block needs recompute_layers"):
        parsolve.check(dense(), config)


def test_nemo_keeps_megatrons_rules() -> None:
    for rule in RULES:
        assert rule.frameworks is None or ("nemo" in rule.frameworks) == ("megatron" in rule.frameworks), rule.name


def test_every_rule_has_a_case() -> None:
    covered = {case[0] for case in CASES}
    internal = {"optimizer_shards", "split_ranks", "split_chunks", "zero_stage", "recomputed_layers"}
    assert {rule.name for rule in RULES} - covered == internal


def test_kv_heads_by_version() -> None:
    assert "kv_heads" in broken(dense(model=GQA, framework_version="0.15"), "tp=8")
    assert "kv_heads" not in broken(dense(model=GQA, framework_version="0.16"), "tp=8")


def test_heads_of_52_leave_no_tp_8() -> None:
    problem = dense(model={"num_heads": 52, "num_kv_heads": 52, "hidden_size": 6656}, cluster="h100-sxm:4x8")
    legal = [tp for tp in (1, 2, 4, 8) if "attention_heads" not in broken(problem, {"tp": tp})]
    assert legal == [1, 2, 4]


def test_both_grids_are_explained_with_their_values() -> None:
    problem = dense()
    message = next(v.message for v in parsolve.check(problem, "tp=4,pp=2,dp=3") if v.rule == "world_size")
    assert "4*1*2*3" in message and "16 GPUs" in message


def test_last_stage_counts() -> None:
    """61 layers over 4 ranks: a last stage of 13 or 16 leaves the middle even, 14 is only a layout."""
    problem = Problem("h800-sxm:4x8", "deepseek-v3", seq_len=4096, gbs=64, framework_version="0.12", without={"memory"})
    config = {"pp": 4, "ep": 8, "etp": 1}
    for layers, legal in (("16|16|16|13", True), ("15|15|15|16", True), ("16|16|15|14", False)):
        assert ("layers_divide" not in broken(problem, {**config, "layers_per_stage": layers})) is legal


def test_expert_groups_may_exceed_data_parallel() -> None:
    """ep 128 with dp 8: experts live on their own grid."""
    problem = Problem("h100-sxm:16x8", "qwen3-235b-a22b", seq_len=262144, gbs=16, without={"memory"})
    config = {"tp": 8, "cp": 2, "ep": 128, "etp": 1, "recompute": "full"}
    assert parsolve.check(problem, config) == []
    assert parsolve.evaluate(problem, config).step_time_s > 0


def test_a_band_excludes_what_no_rank_count_reaches() -> None:
    for nodes, feasible in ((60, True), (80, False), (100, False)):
        problem = Problem(
            f"h200-sxm:{nodes}x8", "llama3.1-8b", seq_len=4096, gbs=2880, gbs_tolerance=0.1, without={"memory"}
        )
        grad_acc = round(2880 / (nodes * 8))
        config = {"mbs": 1, "dp": nodes * 8, "grad_acc": grad_acc}
        assert ("batch_range" not in broken(problem, config)) is feasible
