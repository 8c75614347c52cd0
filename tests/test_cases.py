"""Situations that practitioners met: what is legal, how inputs are read, what lines come out."""

from __future__ import annotations

from typing import Any

import pytest

import parsolve
from parsolve import Model, Problem
from parsolve.errors import SpecError
from parsolve.huggingface import read_config
from parsolve.launchers import launch
from parsolve.reading import parse_config


def shaped(
    cluster: str, gbs: int = 64, seq_len: int = 4096, shape: dict[str, Any] | None = None, **workload: Any
) -> Problem:
    base = {"name": "case", "num_layers": 24, "hidden_size": 4096, "ffn_size": 16384, "num_heads": 32}
    base |= {"num_kv_heads": 32, "head_dim": 128, "vocab_size": 32000}
    model = Model.read({**base, **(shape or {})}, "case")
    return Problem(cluster, model, seq_len=seq_len, gbs=gbs, without={"memory"}, **workload)


def rules(problem: Problem, config: str) -> set[str]:
    return {violation.rule for violation in parsolve.check(problem, config)}


def test_interleaving_needs_a_microbatch_for_every_stage() -> None:
    """pp 6 with 3 microbatches: refused with vpp, allowed without."""
    problem = shaped("h100-sxm:6x8", gbs=24)
    axes = "pp=6,tp=1,dp=8,mbs=1,grad_acc=3"
    assert "microbatch_group" in rules(problem, axes + ",vpp=2")
    assert rules(problem, axes) == set()


def test_few_key_value_heads_by_version() -> None:
    for version, legal in (("0.15", False), ("0.16", True)):
        problem = shaped("h100-sxm:1x8", shape={"num_kv_heads": 2}, framework_version=version)
        assert ("kv_heads" not in rules(problem, "tp=8")) is legal


@pytest.mark.parametrize(
    ("heads", "hidden", "gpus", "legal"), [(52, 6656, 52, [1, 2, 4, 13, 26, 52]), (71, 4544, 8, [1])]
)
def test_odd_head_counts(heads: int, hidden: int, gpus: int, legal: list[int]) -> None:
    shape = {"num_heads": heads, "num_kv_heads": heads, "head_dim": hidden // heads, "hidden_size": hidden}
    problem = shaped(f"gb200-nvl72:1x{gpus}", shape=shape, gbs=gpus)
    assert [
        tp for tp in range(1, gpus + 1) if gpus % tp == 0 and "attention_heads" not in rules(problem, f"tp={tp}")
    ] == legal


def test_expert_grid_takes_tp_when_etp_is_not_given() -> None:
    """etp*ep*pp with etp left out is tp*ep*pp: 4 GPUs hold 1*2*2, not 2*2*2."""
    problem = Problem("h100-sxm:1x4", "qwen3-30b-a3b", seq_len=4096, gbs=512, without={"memory"})
    assert rules(problem, "tp=1,pp=2,ep=2,vpp=24") == set()
    assert "expert_world_size" in rules(problem, "tp=2,pp=2,ep=2")
    assert parse_config("tp=2,pp=2", problem)[0].etp == 2


@pytest.mark.parametrize(("zero", "legal"), [(0, True), (1, True), (2, False), (3, False)])
def test_deepspeed_pipelines_exclude_sharded_gradients(zero: int, legal: bool) -> None:
    problem = shaped("h100-sxm:1x8", framework="deepspeed")
    assert ("zero_with_pipeline" not in rules(problem, f"pp=2,zero={zero}")) is legal


def test_deepspeed_batch_triple_uses_data_parallel_ranks() -> None:
    problem = shaped("h100-sxm:1x8", framework="deepspeed", gbs=8)
    made = launch("deepspeed", problem, parse_config("tp=2,mbs=2,zero=1", problem)[0])
    content = made.config or {}
    triple = [
        content[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    assert triple == [8, 2, 1] and triple[0] == triple[1] * triple[2] * 4


def test_world_too_small_for_the_plan() -> None:
    problem = Problem("a100-sxm-80gb:1x8", "llama3.1-70b", seq_len=4096, gbs=64)
    assert "world_size" in rules(problem, "tp=8,pp=2,dp=1")


def test_ulysses_degrees() -> None:
    """40 heads with 8 key/value heads: 40 is legal, 16, 5, 10 and 20 are not."""
    shape = {"num_heads": 40, "num_kv_heads": 8, "hidden_size": 5120}
    legal = []
    for cp in (1, 2, 4, 5, 8, 10, 16, 20, 40):
        problem = shaped(f"h100-sxm:{cp}x8", shape=shape, seq_len=81920, framework="deepspeed", gbs=64)
        if "ulysses_heads" not in rules(problem, f"cp={cp}"):
            legal.append(cp)
    assert legal == [1, 2, 4, 8, 40]


def test_experts_may_outnumber_data_parallel_ranks() -> None:
    problem = Problem("h100-sxm:16x8", "qwen3-235b-a22b", seq_len=262144, gbs=16, without={"memory"})
    config = parse_config("tp=8,cp=2,ep=128,etp=1", problem)[0]
    assert rules(problem, "tp=8,cp=2,ep=128,etp=1") == set()
    assert (config.dp, config.grad_acc, config.edp) == (8, 2, 1)
    other = Problem("h100-sxm:16x8", "qwen3-235b-a22b", seq_len=262144 + 8, gbs=16, without={"memory"})
    assert "sequence_shards" in rules(other, "tp=8,cp=2,ep=128,etp=1")


def test_torchtitan_sequence_and_experts() -> None:
    problem = shaped("h100-sxm:1x8", framework="torchtitan", seq_len=8193)
    assert "sequence_shards" in rules(problem, "tp=2,zero=3")
    moe = Problem("h100-sxm:1x8", "qwen3-30b-a3b", seq_len=4096, gbs=64, framework="torchtitan", without={"memory"})
    assert "borrowed_experts" in rules(moe, "tp=4,ep=2,etp=1,zero=3")


def test_layers_per_virtual_stage_says_one_thing() -> None:
    """30 layers over pp 4: embedding and loss count as layers, (30+2)/4 = 8; exactly one way to say chunks."""
    problem = shaped("h100-sxm:1x8", shape={"num_layers": 30})
    for vpp, cut in ((2, "3|4*6|3"), (4, "1|2*14|1")):
        config = parse_config(f"pp=4,grad_acc=32,layers_per_stage={cut}", problem)[0]
        words = launch("megatron", problem, config).argv
        ways = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
        assert config.vpp == vpp and sum(way in words for way in (*ways, "--pipeline-model-parallel-layout")) == 1
        assert "--account-for-embedding-in-pipeline-split" in words


@pytest.mark.parametrize(
    ("experts", "ep", "legal"), [(60, 8, False), (160, 64, False), (160, 32, True), (384, 256, False), (384, 96, True)]
)
def test_odd_expert_counts(experts: int, ep: int, legal: bool) -> None:
    shape = {"moe": {"num_experts": experts, "top_k": 8, "ffn_size": 1024}}
    problem = shaped(f"h100-sxm:{ep}x8", shape=shape, gbs=8 * ep)
    assert ("experts_divide" not in rules(problem, f"tp=1,ep={ep},etp=1")) is legal


@pytest.mark.parametrize(("last", "legal"), [("16|16|16|13", True), ("15|15|15|16", True)])
def test_last_stage_of_its_own(last: str, legal: bool) -> None:
    problem = Problem("h800-sxm:4x8", "deepseek-v3", seq_len=4096, gbs=64, framework_version="0.12", without={"memory"})
    config = parse_config(f"pp=4,ep=8,etp=1,layers_per_stage={last}", problem)[0]
    words = launch("megatron", problem, config).argv
    assert words[words.index("--decoder-last-pipeline-num-layers") + 1] == last.rpartition("|")[2]


def test_batch_stays_what_was_asked() -> None:
    problem = Problem("h100-sxm:1x8", "llama2-7b", seq_len=4096, gbs=96)
    result = parsolve.solve(problem, top=20)
    assert {plan.config.gbs for plan in result.plans} == {96}


def test_v100_has_no_bf16() -> None:
    with pytest.raises(SpecError, match="bf16"):
        Problem("v100-sxm-32gb:24x8", "bloom-176b", seq_len=2048, gbs=192)


def test_fast_domains_of_four_and_of_72() -> None:
    small = shaped("a100-sxm-80gb:4x4", shape={"num_heads": 40, "num_kv_heads": 40, "hidden_size": 5120})
    assert "tp_in_domain" in rules(small, "tp=8")
    large = shaped("gb200-nvl72:2x64", gbs=128)
    assert "tp_in_domain" not in rules(large, "tp=16")


@pytest.mark.parametrize(
    "config",
    [
        {
            "model_type": "t5",
            "is_encoder_decoder": True,
            "num_layers": 24,
            "d_model": 2048,
            "d_ff": 5120,
            "num_heads": 32,
        },
        {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "block_configs": [{}, {}]},
    ],
)
def test_what_is_no_plain_transformer_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        read_config(config, "config.json")


def test_sparse_steps_and_dense_layers_of_qwen_moe() -> None:
    """Layer i has experts when (i+1) % step == 0 and it is not listed as dense."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 1000, "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config |= {"tie_word_embeddings": False}
    model = read_config(config, "config.json")
    assert [i for i, is_moe in enumerate(model.layer_is_moe) if is_moe] == [1, 5, 7]


@pytest.mark.parametrize(("name", "params"), [("deepseek-v3", 671026419200), ("gpt-oss-120b", 116829156672)])
def test_parameter_counts(name: str, params: int) -> None:
    problem = Problem("h100-sxm:128x8", name, seq_len=4096, gbs=1024)
    assert problem.model.num_params == pytest.approx(params, rel=1e-7)  # balancing biases may count as buffers
