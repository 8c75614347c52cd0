"""torchtitan, Accelerate and Megatron-Bridge: how plans and batches are spelt, and what has no words."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import yaml
from launch_problems import LATENT, config, experts, model, options, problem

import parsolve
from parsolve.errors import NotExpressibleError
from parsolve.launchers import Launch, launch
from parsolve.launchers.megatron_options import SINCE
from parsolve.launchers.nemo_options import FLAGS, SILENT, VALUES
from parsolve.specs import Recompute

NORMED = {"qk_norm": "head"}


def titan(shape: dict[str, Any] | None = None, workload: dict[str, Any] | None = None, **axes: Any) -> Launch:
    p = problem(model(**(shape or {})), framework="torchtitan", **(workload or {}))
    return launch("torchtitan", p, config(p, **{"zero": 3, **axes}))


def degrees(made: Launch) -> dict[str, str]:
    return {name.rpartition(".")[2]: values[0] for name, values in options(made).items() if "." in name and values}


def test_titan_accumulates_without_a_pipeline() -> None:
    seen = degrees(titan(mbs=2))
    assert (seen["local-batch-size"], seen["global-batch-size"]) == ("2", "64")
    assert (seen["data-parallel-shard-degree"], seen["data-parallel-replicate-degree"]) == ("16", "1")
    assert seen["fsdp-reshard-after-forward"] == "always"


def test_titan_splits_the_local_batch_in_a_pipeline() -> None:
    made = titan(pp=2, mbs=2, zero=1, layers_per_stage=((7,), (9,)))
    seen = degrees(made)
    assert (seen["local-batch-size"], seen["pipeline-parallel-microbatch-size"]) == ("8", "2")
    assert seen["fsdp-reshard-after-forward"] == "never" and "--training.disable-cuda-graphs" in made.argv
    tree = ast.parse(made.files["titan_model.py"])
    stages = next(
        ast.literal_eval(k.value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        for k in n.keywords
        if k.arg == "module_fqns_per_model_part"
    )
    assert [sum(name.startswith("layers.") for name in stage) for stage in stages] == [7, 9]
    assert stages[0][0] == "tok_embeddings" and stages[-1][-2:] == ["norm", "lm_head"]


def test_titan_replicates_without_zero() -> None:
    seen = degrees(titan(zero=0))
    assert (seen["data-parallel-shard-degree"], seen["data-parallel-replicate-degree"]) == ("1", "16")


@pytest.mark.parametrize(
    ("shape", "family", "builder"),
    [
        ({}, "llama3", "_build_llama3_layers"),
        (NORMED, "qwen3", "_build_qwen3_layers"),
        ({**NORMED, "moe": experts()}, "qwen3", "_build_qwen3_moe_layers"),
        ({"mla": LATENT, "moe": experts(shared_ffn_size=2048, dense_layers=(0,))}, "deepseek_v3", "_build_dsv3_layers"),
    ],
)
def test_titan_families(shape: dict[str, Any], family: str, builder: str) -> None:
    text = titan(shape).files["titan_model.py"]
    ast.parse(text)
    assert f"models import {family} as family" in text and builder in text


def test_titan_fp8_converts_linear_layers() -> None:
    made = titan(workload={"precision": "fp8"})
    assert "Float8LinearConverter" in made.files["titan_model.py"] and "--compile.enable" in made.argv


def test_titan_has_no_words() -> None:
    for shape in ({"position": "alibi"}, {"qkv_bias": True}, {"moe": experts()}, {"norm": "layer"}, {"mla": LATENT}):
        with pytest.raises(NotExpressibleError, match="torchtitan's families have no"):
            titan(shape)
    with pytest.raises(NotExpressibleError, match="zero=1"):
        titan(zero=1)
    with pytest.raises(NotExpressibleError, match="selective"):
        titan(recompute=Recompute.SELECTIVE)


def accelerate(cluster: str = "h100-sxm:2x8", **axes: Any) -> Launch:
    p = problem(cluster=cluster, framework="accelerate")
    return launch("accelerate", p, config(p, **axes))


def test_accelerate_file() -> None:
    made = accelerate(zero=3, recompute=Recompute.FULL)
    content = yaml.safe_load(made.files["accelerate.yaml"])
    assert (content["distributed_type"], content["num_processes"], content["num_machines"]) == ("FSDP", 16, 2)
    section = content["fsdp_config"]
    assert section["fsdp_version"] == 2 and section["fsdp_reshard_after_forward"] is True
    assert section["fsdp_activation_checkpointing"] is True and "--gradient_checkpointing" not in made.argv
    assert "sync_each_batch" in options(made)["--accelerator_config"][0]
    assert made.to_json() == {"command": made.line(), "files": made.files}


def test_accelerate_without_sharding() -> None:
    made = accelerate("h100-sxm:1x8", zero=0, recompute=Recompute.FULL)
    content = yaml.safe_load(made.files["accelerate.yaml"])
    assert content["distributed_type"] == "MULTI_GPU" and "fsdp_config" not in content
    assert "--gradient_checkpointing" in made.argv and "--machine_rank" not in made.argv


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"zero": 1}, {"recompute": Recompute.SELECTIVE}])
def test_accelerate_has_no_words(axes: dict[str, Any]) -> None:
    with pytest.raises(NotExpressibleError):
        accelerate(**{"zero": 3, **axes})


def nemo(shape: dict[str, Any] | None = None, **axes: Any) -> dict[str, str]:
    p = problem(model(**(shape or {})), framework="nemo")
    words = launch("nemo", p, config(p, **axes)).argv
    return dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))


def test_nemo_translates_every_option() -> None:
    known = [*VALUES, *FLAGS, *SILENT]
    assert sorted(known) == sorted(SINCE)


def test_nemo_overrides() -> None:
    seen = nemo(tp=2, pp=2, vpp=2)
    assert seen["model.tensor_model_parallel_size"] == seen["model.virtual_pipeline_model_parallel_size"] == "2"
    assert seen["ddp.use_distributed_optimizer"] == "true" and seen["checkpoint.save"] == "null"
    assert seen["train.global_batch_size"] == "64" and seen["model.activation_func"] == "silu"
    assert nemo(pp=4, layers_per_stage=((4,), (5,), (4,), (3,)))["model.pipeline_model_parallel_layout"][0] == '"'
    assert nemo({"moe": experts(dense_layers=(0,))})["model.moe_layer_freq"] == f"[0{',1' * 15}]"
    assert nemo({"mla": LATENT})["model.mtp_num_layers"] == "null"


@pytest.mark.parametrize("framework", ["torchtitan", "accelerate", "nemo"])
def test_solve_offers_only_what_can_be_said(framework: str) -> None:
    p = parsolve.Problem("h100-sxm:1x8", "qwen3-8b", seq_len=4096, gbs=32, framework=framework)
    result = parsolve.solve(p, top=5)
    assert len(result.plans) == 5
    for plan in result.plans:
        assert plan.args(framework)
