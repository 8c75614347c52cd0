"""The DeepSpeed launcher: plain ZeRO, Megatron-DeepSpeed, the JSON file, host files, refusals."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launch_problems import GPT, LATENT, config, experts, model, options, problem

from parsolve import Problem
from parsolve.config import Config
from parsolve.errors import NotExpressibleError
from parsolve.launchers import Launch, launch
from parsolve.objectives import parameters
from parsolve.specs import Recompute
from parsolve.splits import Splits

KEYS_FILE = Path(__file__).parents[2] / "shared" / "launch" / "deepspeed_keys.json"
LAUNCHER_FLAGS = {"--hostfile", "--num_nodes", "--num_gpus"}


def deepspeed(p: Problem, **changes: Any) -> Launch:
    return launch("deepspeed", p, config(p, **{"sequence_parallel": False, **changes}))


def ds_problem(cluster: str = "h100-sxm:2x8", shape: dict[str, Any] | None = None, **options: Any) -> Problem:
    return problem(model(**(shape or {})), cluster, framework="deepspeed", **options)


def test_plain_zero() -> None:
    result = deepspeed(ds_problem(), zero=3, mbs=2, recompute=Recompute.FULL)
    assert result.line().startswith("deepspeed --hostfile hostfile --num_nodes 2 --num_gpus 8 run_clm.py --deepspeed ")
    found = options(result)
    assert found["--deepspeed"] == ["ds_config.json"]
    assert found["--per_device_train_batch_size"] == ["2"]
    assert found["--gradient_accumulation_steps"] == ["2"]
    assert {"--bf16", "--gradient_checkpointing"} <= set(found)
    assert result.config is not None
    assert json.loads(result.files["ds_config.json"]) == result.config
    assert result.to_json() == {"command": result.line(), "config": result.config}
    assert result.config["train_batch_size"] == 64
    assert result.config["bf16"] == {"enabled": True}
    assert result.config["zero_optimization"]["stage"] == 3
    assert result.config["zero_optimization"]["reduce_bucket_size"] == 1024 * 1024


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_batch_triple(zero: int) -> None:
    p = ds_problem()
    content = deepspeed(p, zero=zero, mbs=2).config or {}
    product = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"] * 16
    assert content["train_batch_size"] == product
    assert content["zero_optimization"]["stage"] == zero


def test_host_file_only_for_several_hosts() -> None:
    assert deepspeed(ds_problem()).files["hostfile"] == "host0 slots=8\nhost1 slots=8\n"
    alone = deepspeed(ds_problem("h100-sxm:1x8"))
    assert set(alone.files) == {"ds_config.json"}
    assert alone.line().startswith("deepspeed --num_gpus 8 run_clm.py")


def test_fp16_and_sgd() -> None:
    result = deepspeed(ds_problem("v100-sxm-32gb:1x8", precision="fp16", optimizer="sgd"))
    assert result.config is not None
    assert result.config["fp16"] == {"enabled": True}
    assert "bf16" not in result.config
    assert result.config["zero_allow_untested_optimizer"] is True
    assert options(result)["--optim"] == ["sgd"]


def test_any_model_under_plain_zero() -> None:
    for shape in ({"position": "alibi"}, {"mla": LATENT}, {"moe": experts(shared_ffn_size=512)}):
        assert "run_clm.py" in deepspeed(ds_problem(shape=shape)).argv


@pytest.mark.parametrize(
    ("shape", "axes", "present", "absent"),
    [
        ({}, {"tp": 2, "zero": 3}, {"--no-pipeline-parallel": [], "--zero-stage": ["3"]}, {"--sequence-parallel"}),
        ({}, {"tp": 2, "pp": 2}, {"--pipeline-model-parallel-size": ["2"]}, {"--no-pipeline-parallel"}),
        ({}, {"cp": 4}, {"--ds-sequence-parallel-size": ["4"], "--no-pipeline-parallel": []}, set()),
        ({}, {"tp": 2}, {"--num-key-value-heads": ["4"], "--normalization": ["rmsnorm"], "--swiglu": []}, set()),
        (
            {},
            {"tp": 2},
            {"--use-rotary-position-embeddings": [], "--rotary-position-embeddings-theta": ["10000"]},
            {"--position-embedding-type", "--mock-data"},
        ),
        ({}, {"tp": 2}, {"--vocab-size": ["31999"], "--deepspeed_config": ["ds_config.json"]}, set()),
        (GPT, {"tp": 2}, {"--normalization": ["layernorm"]}, {"--disable-bias-linear", "--swiglu"}),
        (
            {},
            {"recompute": Recompute.SELECTIVE},
            {"--recompute-granularity": ["selective"]},
            {"--recompute-method", "--checkpoint-activations"},
        ),
        ({}, {"tp": 2, "recompute": Recompute.FULL}, {"--recompute-method": ["uniform"]}, set()),
        (
            {"moe": experts()},
            {"tp": 2, "ep": 4, "edp": 2},
            {"--num-experts": ["8"], "--topk": ["2"], "--moe-expert-parallel-size": ["4"]},
            {"--moe-router-topk"},
        ),
        ({"moe": experts()}, {"tp": 2, "ep": 4}, {"--enable-expert-tensor-parallelism": []}, set()),
    ],
)
def test_megatron_deepspeed_options(
    shape: dict[str, Any], axes: dict[str, Any], present: dict[str, list[str]], absent: set[str]
) -> None:
    result = deepspeed(ds_problem(shape=shape), **axes)
    found = options(result)
    assert "pretrain_gpt.py" in result.argv
    assert present.items() <= found.items()
    assert not absent & set(found)
    assert any("deepspeed<=0.19.6" in note for note in result.notes)


def test_auto_tp() -> None:
    """transformers counts all processes into train_batch_size, so that the file leaves it out."""
    result = deepspeed(ds_problem(shape={"qk_norm": "head"}), tp=4, zero=2, mbs=2)
    assert "run_clm.py" in result.argv and result.config is not None
    assert result.config["tensor_parallel"] == {"autotp_size": 4}
    assert "train_batch_size" not in result.config
    batch = result.config["train_micro_batch_size_per_gpu"], result.config["gradient_accumulation_steps"]
    assert batch == (2, 8)
    assert options(result)["--gradient_accumulation_steps"] == ["8"]
    plain = deepspeed(ds_problem(shape={"qk_norm": "head"}), tp=1, zero=2)
    assert plain.config is not None and "tensor_parallel" not in plain.config


def test_auto_tp_keeps_the_embedding_and_the_logits_whole() -> None:
    normed, plain = (ds_problem(shape=shape) for shape in ({"qk_norm": "head"}, {}))
    tied = ds_problem(shape={"qk_norm": "head", "tied_embeddings": True})
    first, second, third = (p.instance(64, Splits((), ())) for p in (normed, plain, tied))
    assert first.auto_tp and not second.auto_tp
    size = 32000 * 1024
    assert parameters.embedding_params(first, 4) == size
    assert parameters.embedding_params(second, 4) == pytest.approx(size / 4, rel=0.01)
    assert parameters.loss_vocab(first, 4) == pytest.approx(4 * parameters.loss_vocab(second, 4))
    assert parameters.loss_vocab(third, 4) == parameters.loss_vocab(second, 4)


def test_environment_reaches_every_host() -> None:
    result = deepspeed(ds_problem(), tp=2, sequence_parallel=True)
    assert result.env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert result.files[".deepspeed_env"] == "CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    assert "--sequence-parallel" in result.argv


def test_experts_in_a_pipeline_are_not_partitioned() -> None:
    result = deepspeed(ds_problem(shape={"moe": experts()}), pp=2, ep=2)
    assert result.config is not None
    assert result.config["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}


@pytest.mark.parametrize(
    ("shape", "axes", "reason"),
    [
        ({"position": "alibi"}, {"tp": 2}, "ALiBi"),
        ({"mla": LATENT}, {"tp": 2}, "latent attention"),
        ({"qk_norm": "head"}, {"pp": 2}, "norms of queries"),
        ({"qk_norm": "head"}, {"tp": 2, "zero": 3}, "AutoTP"),
        ({"qk_norm": "head"}, {"tp": 2, "sequence_parallel": True}, "AutoTP"),
        ({"qk_norm": "head", "moe": experts()}, {"tp": 2}, "norms of queries"),
        ({"window": 8, "window_layers": (0,)}, {"cp": 2}, "sliding windows"),
        ({"moe": experts(shared_ffn_size=64)}, {"ep": 2}, "shared experts"),
        ({"moe": experts(router_score="sigmoid")}, {"ep": 2}, "sigmoid routing"),
        ({"moe": experts(dense_layers=(0,))}, {"ep": 2}, "another width"),
        ({"moe": experts()}, {"tp": 2, "etp": 1, "ep": 2}, "etp=1"),
        ({"moe": experts()}, {"ep": 2, "zero": 3}, "ZeRO-3"),
        ({}, {"pp": 2, "vpp": 2}, "virtual stages"),
        ({}, {"pp": 2, "layers_per_stage": ((7,), (9,))}, "evenly"),
        ({}, {"pp": 2, "zero": 2}, "ZeRO 0 and 1"),
        ({}, {"cp": 2, "tp": 2}, "tp=1 and pp=1"),
        ({}, {"tp": 8}, "key/value heads"),
    ],
)
def test_what_has_no_words(shape: dict[str, Any], axes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressibleError, match=reason):
        deepspeed(ds_problem(shape=shape), **axes)


def test_fp8_has_no_words() -> None:
    with pytest.raises(NotExpressibleError, match="fp8"):
        deepspeed(ds_problem(precision="fp8"))


def test_plan_of_another_framework() -> None:
    p = problem()
    assert "--sequence-parallel" in launch("deepspeed", p, config(p, tp=2)).argv
    with pytest.raises(NotExpressibleError, match=r"virtual stages|cannot spell"):
        launch("deepspeed", p, config(p, pp=2, vpp=2))


@cache
def keys() -> dict[str, Any]:
    """The real keys and flags of DeepSpeed, its launcher, and Megatron-DeepSpeed."""
    if not KEYS_FILE.exists():
        pytest.skip("the table of launcher options is not here")
    table: dict[str, Any] = json.loads(KEYS_FILE.read_text())
    return table


def random_launches(count: int) -> list[tuple[Config, Launch]]:
    rng = random.Random(3)
    shapes: list[dict[str, Any]] = [{}, GPT, {"moe": experts()}, {"gated_mlp": False, "activation": "relu2"}]
    launches = []
    for i in range(count):
        p = ds_problem(shape=shapes[i % len(shapes)], optimizer=rng.choice(["adam", "sgd"]))
        tp, pp, cp = rng.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)])
        plan = {"tp": tp, "pp": pp, "cp": cp, "ep": rng.choice([1, 2]) if p.model.moe else 1}
        plan |= {
            "zero": rng.choice([0, 1]),
            "recompute": rng.choice([Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL]),
        }
        made = config(p, sequence_parallel=rng.choice([True, False]) and tp > 1, **plan)
        launches.append((made, launch("deepspeed", p, made)))
    return launches


def test_options_exist() -> None:
    known = {name: row for row in keys()["megatron_deepspeed"]["flags"] for name in row["flags"]}
    launcher = {name for row in keys()["launcher_flags"] for name in row["flags"]}
    assert launcher >= LAUNCHER_FLAGS
    for _, result in random_launches(120):
        if "pretrain_gpt.py" not in result.argv:
            continue
        for option, values in options(result).items():
            if option in LAUNCHER_FLAGS:
                continue
            row = known[option]
            assert len(values) == (0 if row["action"].startswith("Store") and row["nargs"] == 0 else 1), option
            assert not row["choices"] or values[0] in row["choices"], option


def test_keys_exist() -> None:
    top, zero = set(keys()["top_level_keys_read_by_DeepSpeedConfig"]), set(keys()["zero_optimization"])
    pipeline, removed = set(keys()["pipeline"]), set(keys()["removed_top_level"])
    results = [result for _, result in random_launches(60)]
    results += [deepspeed(ds_problem(), zero=stage) for stage in range(4)]
    for result in results:
        content = result.config or {}
        assert set(content) <= top - removed
        assert set(content["zero_optimization"]) <= zero
        assert set(content.get("pipeline", {})) <= pipeline
