"""The Megatron launcher: options by version, choices, refusals."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launch_problems import GPT, LATENT, config, experts, model, options, problem, random_plans

from parsolve import Problem
from parsolve.errors import NotExpressibleError
from parsolve.launchers import Launch, launch
from parsolve.launchers.megatron import layout_text
from parsolve.launchers.megatron_model import pattern
from parsolve.launchers.megatron_options import SINCE
from parsolve.specs import Recompute
from parsolve.splits import from_model_order

FLAGS_FILE = Path(__file__).parents[2] / "shared" / "launch" / "megatron_flags.json"
TORCHRUN = {"--nnodes", "--nproc-per-node", "--standalone", "--rdzv-backend", "--rdzv-endpoint"}


def megatron(p: Problem, **changes: Any) -> Launch:
    return launch("megatron", p, config(p, **changes))


def test_a_complete_line() -> None:
    p = problem()
    result = megatron(p, tp=2, pp=2, vpp=2, mbs=2, recompute=Recompute.FULL)
    line = result.line()
    assert line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d")
    assert "\n" not in line
    assert result.to_json() == line
    expected = {
        "--num-layers": ["16"],
        "--kv-channels": ["64"],
        "--group-query-attention": [],
        "--num-query-groups": ["4"],
        "--tensor-model-parallel-size": ["2"],
        "--pipeline-model-parallel-size": ["2"],
        "--num-layers-per-virtual-pipeline-stage": ["4"],
        "--sequence-parallel": [],
        "--use-distributed-optimizer": [],
        "--overlap-grad-reduce": [],
        "--overlap-param-gather": [],
        "--recompute-granularity": ["full"],
        "--recompute-method": ["uniform"],
        "--recompute-num-layers": ["1"],
        "--micro-batch-size": ["2"],
        "--global-batch-size": ["64"],
        "--train-iters": ["10"],
        "--bf16": [],
        "--mock-data": [],
        "--tokenizer-type": ["NullTokenizer"],
        "--vocab-size": ["32000"],
        "--rotary-base": ["10000"],
    }
    assert expected.items() <= options(result).items()


def test_one_host_needs_no_rendezvous() -> None:
    result = megatron(problem(cluster="h100-sxm:1x8"))
    assert "--standalone" in result.argv
    assert "--rdzv-endpoint" not in result.argv
    assert result.notes == []


@pytest.mark.parametrize(
    ("cluster", "axes", "value"),
    [
        ("h100-sxm:2x8", {"tp": 2}, "1"),
        ("a100-sxm-80gb:2x8", {"cp": 2}, "1"),
        ("h100-sxm:2x8", {"pp": 2}, None),
        ("b200:2x8", {"tp": 2}, None),
        ("h100-sxm:2x8", {"tp": 2, "zero": 3}, "8"),
    ],
)
def test_hardware_queues(cluster: str, axes: dict[str, int], value: str | None) -> None:
    assert megatron(problem(cluster=cluster), **axes).env.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


def test_processes_of_a_wide_domain() -> None:
    found = options(megatron(problem(cluster="gb200-nvl72:2x64", gbs=512), tp=2))
    assert (found["--nnodes"], found["--nproc-per-node"]) == (["32"], ["4"])


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({"num_kv_heads": 16}, {}, {"--group-query-attention", "--num-query-groups"}),
        ({"qk_norm": "head"}, {"--qk-layernorm": []}, set()),
        ({"qkv_bias": True}, {"--add-qkv-bias": [], "--disable-bias-linear": []}, set()),
        ({}, {"--disable-bias-linear": [], "--swiglu": [], "--normalization": ["RMSNorm"]}, {"--add-qkv-bias"}),
        (GPT, {"--position-embedding-type": ["learned_absolute"], "--max-position-embeddings": ["8192"]}, {"--swiglu"}),
        (GPT, {"--normalization": ["LayerNorm"]}, {"--disable-bias-linear", "--no-bias-gelu-fusion", "--rotary-base"}),
        (GPT, {}, {"--untie-embeddings-and-output-weights"}),
        ({**GPT, "mlp_bias": False}, {"--disable-bias-linear": [], "--no-bias-gelu-fusion": []}, set()),
        (
            {"gated_mlp": False, "activation": "relu2"},
            {"--squared-relu": [], "--no-bias-gelu-fusion": []},
            {"--swiglu"},
        ),
        ({"activation": "gelu"}, {"--quick-geglu": []}, {"--swiglu"}),
        ({"rope_base": 5e5, "rope_fraction": 0.5}, {"--rotary-base": ["500000"], "--rotary-percent": ["0.5"]}, set()),
        ({"position": "none"}, {"--position-embedding-type": ["none"]}, {"--rotary-base"}),
        (
            {"window": 128, "window_layers": tuple(range(0, 16, 2))},
            {"--window-size": ["127,0"], "--window-attn-skip-freq": ["([1]+[0])*8"]},
            set(),
        ),
        ({"window": 128, "window_layers": tuple(range(16))}, {"--window-size": ["127,0"]}, {"--window-attn-skip-freq"}),
        ({"window": 4096, "window_layers": tuple(range(16))}, {}, {"--window-size"}),
        ({"attention_sinks": True}, {"--softmax-type": ["learnable"]}, set()),
        (
            {"mla": LATENT},
            {"--multi-latent-attention": [], "--q-lora-rank": ["512"], "--qk-head-dim": ["64"], "--v-head-dim": ["64"]},
            {"--group-query-attention", "--kv-channels"},
        ),
        ({"mla": LATENT}, {"--rope-type": ["rope"], "--no-rope-fusion": [], "--qk-layernorm": []}, set()),
    ],
)
def test_model_options(changes: dict[str, Any], present: dict[str, list[str]], absent: set[str]) -> None:
    found = options(megatron(problem(model(**changes))))
    assert present.items() <= found.items()
    assert not absent & set(found)


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        (
            {},
            {"--num-experts": ["8"], "--moe-ffn-hidden-size": ["2048"], "--moe-router-topk": ["2"]},
            {"--moe-layer-freq", "--moe-router-pre-softmax", "--moe-shared-expert-intermediate-size"},
        ),
        ({}, {"--expert-tensor-parallel-size": ["1"], "--moe-grouped-gemm": []}, set()),
        ({}, {"--moe-token-dispatcher-type": ["alltoall"]}, {"--moe-router-score-function"}),
        ({"top_k": 1}, {"--moe-router-pre-softmax": []}, set()),
        ({"top_k": 1, "router_score": "sigmoid"}, {}, {"--moe-router-pre-softmax"}),
        ({"dense_layers": (0, 1)}, {"--moe-layer-freq": ["([0]*2+[1]*14)"], "--ffn-hidden-size": ["4096"]}, set()),
        ({"shared_ffn_size": 512}, {"--moe-shared-expert-intermediate-size": ["512"]}, {"--moe-shared-expert-gate"}),
        ({"shared_ffn_size": 512, "shared_gate": True}, {"--moe-shared-expert-gate": []}, set()),
        (
            {"router_score": "sigmoid", "score_correction_bias": True, "num_groups": 4, "group_top_k": 2},
            {"--moe-router-enable-expert-bias": [], "--moe-router-num-groups": ["4"], "--moe-router-group-topk": ["2"]},
            set(),
        ),
        ({"score_correction_bias": True}, {}, {"--moe-router-enable-expert-bias"}),
    ],
)
def test_expert_options(changes: dict[str, Any], present: dict[str, list[str]], absent: set[str]) -> None:
    found = options(megatron(problem(model(moe=experts(**changes))), tp=2, etp=1, ep=8))
    assert present.items() <= found.items()
    assert not absent & set(found)


def test_expert_biases_switch_a_fusion_off() -> None:
    shape = model(qkv_bias=True, attention_out_bias=True, moe=experts(expert_bias=True, router_bias=True))
    found = options(megatron(problem(shape), ep=8))
    assert "--no-bias-dropout-fusion" in found
    assert "--disable-bias-linear" not in found


@pytest.mark.parametrize(("version", "size"), [("0.17", "31999"), ("0.18", "32000"), ("0.20", "32000")])
def test_null_tokenizer_adds_a_token_up_to_0_17(version: str, size: str) -> None:
    assert options(megatron(problem(framework_version=version)))["--vocab-size"] == [size]


@pytest.mark.parametrize(
    ("cluster", "precision", "present"),
    [
        ("h100-sxm:2x8", "fp8", {"--bf16": [], "--fp8-format": ["hybrid"], "--fp8-recipe": ["tensorwise"]}),
        ("b200:2x8", "fp8", {"--bf16": [], "--fp8-recipe": ["mxfp8"]}),
        ("v100-sxm-32gb:2x8", "fp16", {"--fp16": []}),
    ],
)
def test_precision(cluster: str, precision: str, present: dict[str, list[str]]) -> None:
    assert present.items() <= options(megatron(problem(cluster=cluster, precision=precision))).items()


@pytest.mark.parametrize(
    ("axes", "present", "absent"),
    [
        ({"zero": 0}, {"--overlap-grad-reduce": []}, {"--use-distributed-optimizer", "--overlap-param-gather"}),
        ({"zero": 0, "tp": 8, "pp": 2}, {}, {"--overlap-grad-reduce"}),
        ({"zero": 2}, {"--data-parallel-sharding-strategy": ["optim_grads"], "--ckpt-format": ["fsdp_dtensor"]}, set()),
        (
            {"zero": 3},
            {"--use-megatron-fsdp": [], "--data-parallel-sharding-strategy": ["optim_grads_params"]},
            set(),
        ),
        ({"recompute": Recompute.SELECTIVE}, {"--recompute-modules": ["core_attn"]}, {"--recompute-method"}),
        ({"cp": 2}, {"--context-parallel-size": ["2"], "--cp-comm-type": ["p2p"]}, set()),
        ({"tp": 2, "sequence_parallel": False}, {}, {"--sequence-parallel", "--expert-tensor-parallel-size"}),
    ],
)
def test_plan_options(axes: dict[str, Any], present: dict[str, list[str]], absent: set[str]) -> None:
    found = options(megatron(problem(), **axes))
    assert present.items() <= found.items()
    assert not absent & set(found)


@pytest.mark.parametrize(
    ("layers", "cut", "present"),
    [
        (16, [4, 4, 4, 4], {}),
        (
            14,
            [3, 4, 4, 3],
            {"--account-for-embedding-in-pipeline-split": [], "--account-for-loss-in-pipeline-split": []},
        ),
        (15, [3, 4, 4, 4], {"--account-for-embedding-in-pipeline-split": []}),
        (15, [4, 4, 4, 3], {"--account-for-loss-in-pipeline-split": []}),
        (16, [5, 4, 4, 3], {"--decoder-first-pipeline-num-layers": ["5"], "--decoder-last-pipeline-num-layers": ["3"]}),
        (16, [4, 5, 4, 3], {"--pipeline-model-parallel-layout": ["Et*4|t*5|t*4|t*3L"]}),
        (16, [0, 5, 5, 6], {"--pipeline-model-parallel-layout": ["E|(t*5|)*2t*6L"]}),
    ],
)
def test_pipeline_cuts(layers: int, cut: list[int], present: dict[str, list[str]]) -> None:
    p = problem(model(num_layers=layers))
    found = options(megatron(p, pp=4, layers_per_stage=from_model_order(cut, 4)))
    words = ("account", "decoder-first", "decoder-last", "layout", "virtual")
    assert {name: value for name, value in found.items() if any(word in name for word in words)} == present


def test_uneven_interleaving_counts_the_chunks() -> None:
    p = problem(model(num_layers=14))
    found = options(megatron(p, pp=4, vpp=2, layers_per_stage=((1, 2), (2, 2), (2, 2), (2, 1))))
    assert found["--num-virtual-stages-per-pipeline-rank"] == ["2"]
    assert "--num-layers-per-virtual-pipeline-stage" not in found


def unroll(layout: str) -> list[str]:
    """Stages of a layout string, by the rules of pipeline_parallel_layer_layout.py."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda m: m.group(1) * int(m.group(2)), layout)
    return layout.split("|")


def test_layout_text_reads_back() -> None:
    rng = random.Random(1)
    for _ in range(200):
        counts = [rng.choice([0, 1, 1, 2, 3, 12]) for _ in range(rng.randint(2, 24))]
        stages = unroll(layout_text(counts))
        assert [stage.count("t") for stage in stages] == counts
        assert "".join(stages) == "E" + "t" * sum(counts) + "L"


def test_pattern_reads_back() -> None:
    rng = random.Random(2)
    for _ in range(200):
        flags = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))] * rng.randint(1, 4)
        text = pattern(flags)
        assert re.fullmatch(r"[\[\]()+*01-9]+", text)
        assert eval(text) == flags
    assert pattern([0] * 3 + [1] * 58) == "([0]*3+[1]*58)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position": "alibi"}, "ALiBi"),
        ({"norms_per_layer": 1}, "parallel attention and MLP"),
        ({"norms_per_layer": 4}, "layers of 4 norms"),
        ({"embedding_norm": True}, "norm after the embedding"),
        ({"activation": "relu"}, "gated MLP with relu"),
    ],
)
def test_models_without_words(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressibleError, match=reason):
        megatron(problem(model(**changes)))


@pytest.mark.parametrize(
    ("version", "shape", "axes", "reason"),
    [
        ("0.14", {"attention_sinks": True}, {}, "sinks needs --softmax-type, which exists from Megatron-LM 0.15 on"),
        ("0.14", {"window": 64, "window_layers": (0,)}, {}, "sliding window needs --window-size"),
        ("0.14", {"activation": "gelu"}, {}, "gated GELU needs --quick-geglu"),
        ("0.15", {"moe": experts(shared_ffn_size=512, shared_gate=True)}, {}, "0.16"),
        ("0.12", {}, {"pp": 4, "layers_per_stage": ((4,), (5,), (4,), (3,))}, "layer cut needs .*-layout"),
        ("0.13", {}, {"zero": 3}, "zero=3 needs --use-megatron-fsdp, which exists from Megatron-LM 0.14 on"),
    ],
)
def test_versions_without_words(version: str, shape: dict[str, Any], axes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressibleError, match=reason):
        megatron(problem(model(**shape), framework_version=version), **axes)


def test_plans_without_words() -> None:
    with pytest.raises(NotExpressibleError, match="sequence parallelism"):
        megatron(problem(model(moe=experts())), tp=2, sequence_parallel=False)
    with pytest.raises(NotExpressibleError, match="no sgd"):
        megatron(problem(optimizer="sgd"), zero=1)
    with pytest.raises(NotExpressibleError, match="v100"):
        megatron(problem(cluster="v100-sxm-32gb:2x8", precision="fp16"), cp=2)
    with pytest.raises(NotExpressibleError, match="whole heads"):
        megatron(problem(model(attention_sinks=True)), cp=8)


def test_context_exchange_of_windows() -> None:
    windows = model(window=128, window_layers=(0,))
    result = megatron(problem(windows), cp=4)
    assert options(result)["--cp-comm-type"] == ["a2a"]
    assert any("a2a" in note for note in result.notes)
    assert options(megatron(problem(windows), cp=8))["--cp-comm-type"] == ["all_gather"]


def test_what_differs_slightly_is_noted() -> None:
    shape = model(mlp_bias=True, norm="layer", qk_norm="full", head_bias=True, mtp_layers=1, final_norm=False)
    notes = " ".join(megatron(problem(shape, cluster="h100-sxm:1x8", mtp_layers=0)).notes)
    for word in (
        "MLP biases",
        "layer norms get biases",
        "per head",
        "output layer's bias",
        "multi-token",
        "every norm",
    ):
        assert word in notes


@cache
def flags_of_versions() -> dict[str, dict[str, Any]]:
    """Every option of the real parsers by version ``0.12`` … ``0.20``."""
    if not FLAGS_FILE.exists():
        pytest.skip("the table of launcher options is not here")
    table = json.loads(FLAGS_FILE.read_text())
    versions: dict[str, dict[str, Any]] = {}
    for row in table["flags"]:
        for tag in row["present_in"]:
            found = re.search(r"0\.\d+", "0.20" if tag == "HEAD" else tag)
            assert found
            for name in row["flags"]:
                versions.setdefault(found.group(), {})[name] = row
    return versions


@pytest.mark.parametrize("minor", range(12, 21))
def test_table_of_options_is_true(minor: int) -> None:
    known = flags_of_versions()[f"0.{minor}"]
    for option, since in SINCE.items():
        assert (option in known) == (since <= (0, minor)), option


@pytest.mark.parametrize("minor", range(12, 21))
def test_options_exist_in_their_version(minor: int) -> None:
    """Random plans of all kinds of models: options exist, take that many values, and these values."""
    known, lines = flags_of_versions()[f"0.{minor}"], 0
    for p, plan in random_plans(f"0.{minor}", 150):
        try:
            result = launch("megatron", p, plan)
        except NotExpressibleError:
            continue
        lines += 1
        for option, values in options(result).items():
            if option in TORCHRUN:
                continue
            row = known[option]
            takes = 0 if row["action"].startswith("StoreT") or row["action"].startswith("StoreF") else 1
            given = len([word for word in values if word != "pretrain_gpt.py"])
            assert given == takes or (given > 1 and row["nargs"] in ("*", "+")), option
            if row["choices"] and minor == 20:
                assert values[0] in row["choices"], option
            if row["type"] == "int":
                assert values[0].isdigit(), option
    assert lines > 60
