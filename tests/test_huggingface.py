"""Reading config.json: exact counts against the real model code, every trap refused with a reason, nothing guessed.

``data/huggingface_cases.jsonl`` holds, a line each, a configuration and the number of parameters that the model code of
transformers 5.24.0 creates for it (built on the meta device; tied weights once): each family's class defaults,
small models with its switches thrown both ways, and published shapes with the keys that their files carry along.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import parsolve
from parsolve.errors import NotExpressibleError, SpecError, UnknownNameError
from parsolve.huggingface import read_config
from parsolve.huggingface.families import ALIASES, FAMILIES, WRAPPERS
from parsolve.huggingface.refused import FOREIGN_KEYS, REFUSED_KEYS, REFUSED_TYPES
from parsolve.launchers import launch
from parsolve.reading import parse_config
from parsolve.specs.model import Model

CASES = [json.loads(line) for line in (Path(__file__).parent / "data/huggingface_cases.jsonl").read_text().splitlines()]
SHARED = Path(__file__).parents[2] / "shared"
HUB = SHARED / "hf_configs"

needs_shared = pytest.mark.skipif(not HUB.is_dir(), reason="the published configurations are not here")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MIXTRAL: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}


def read(data: dict[str, Any], text_only: bool = False, **changes: Any) -> Model:
    return read_config({**data, **changes}, "config.json", text_only)


def refusal(data: dict[str, Any], text_only: bool = False, **changes: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read(data, text_only, **changes)
    assert caught.value.where is not None
    assert caught.value.where.startswith("config.json")
    return caught.value


def without(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in keys}


# ---- exact -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_count_of_the_real_model_code(case: dict[str, Any]) -> None:
    assert read_config(case["config"], case["id"]).num_params == case["params"]


def test_every_family_has_a_case() -> None:
    assert {case["config"]["model_type"] for case in CASES} >= set(FAMILIES) - {"glm4v_text"}


# Totals of published models, and of the text parts of multimodal ones, from the same model code.
GEMMA3_270M = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "hidden_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 2048,
    "vocab_size": 262144,
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "multi_query": True,
    "vocab_size": 65024,
}
FALCON_40B = {
    "model_type": "falcon",
    "num_hidden_layers": 60,
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
    "vocab_size": 65024,
}
REFINED_WEB = {"model_type": "RefinedWeb", "n_layer": 60, "hidden_size": 8192, "n_head": 128, "n_head_kv": 8}
REFINED_WEB |= {"vocab_size": 65024, "parallel_attn": True, "bias": False, "alibi": False}
DBRX = {
    "model_type": "dbrx",
    "n_layers": 40,
    "d_model": 6144,
    "n_heads": 48,
    "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "ffn_act_fn": {"name": "silu"}},
}
BLOOM = {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}
DOTS1 = {
    **without(DEEPSEEK_V3, "q_lora_rank", "kv_lora_rank", "head_dim"),
    "model_type": "dots1",
    "num_hidden_layers": 62,
    "hidden_size": 4608,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "n_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "vocab_size": 152064,
}
HUNYUAN = {**LLAMA, "model_type": "hunyuan_v1_dense", "num_hidden_layers": 32, "hidden_size": 4096, "head_dim": 128}
HUNYUAN |= {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 290943}


@pytest.mark.parametrize(
    ("data", "params"),
    [
        (DEEPSEEK_V3, 671_026_404_352),
        (GEMMA3_270M, 268_098_176),
        (FALCON_7B, 6_921_720_704),
        (FALCON_40B, 41_303_293_952),
        (REFINED_WEB, 41_303_293_952),
        (DBRX, 131_596_523_520),
        (BLOOM, 176_247_271_424),
        (DOTS1, 161_206_276_032),
        (HUNYUAN, 8_859_684_864),
    ],
    ids=["deepseek-v3", "gemma-3-270m", "falcon-7b", "falcon-40b", "refined-web", "dbrx", "bloom", "dots1", "hunyuan"],
)
def test_published_totals(data: dict[str, Any], params: int) -> None:
    assert read(data).num_params == params


@needs_shared
@pytest.mark.parametrize("path", sorted(HUB.glob("*--*.json")) + sorted(HUB.glob("*hf.json")), ids=lambda p: p.stem)
def test_published_file_is_exact_or_refused(path: Path) -> None:
    data = json.loads(path.read_text())
    truth = json.loads((HUB / "param_counts.json").read_text())[path.name]
    fitting = {"nemotron_h": "state-space", "qwen3_5": "linear-attention", "glm_moe_dsa": "indexer"}
    if data["model_type"] in fitting:
        with pytest.raises(SpecError, match=fitting[data["model_type"]]):
            read_config(data, path.name, text_only=True)
        return
    multimodal = data["model_type"] in WRAPPERS
    if multimodal:
        with pytest.raises(SpecError, match="--text-only"):
            read_config(data, path.name)
    model = read_config(data, path.name, text_only=multimodal)
    assert model.name == path.stem
    assert multimodal == any("only the language model" in note for note in model.notes)
    if "vision tower" not in truth.get("note", ""):
        assert model.num_params == truth["params"]
    if "tied" in truth:
        assert model.tied_embeddings is truth["tied"]
        assert model.embedding_and_head_params == truth["embedding_and_head"]
        assert model.routed_expert_params == truth["routed_experts"]


@needs_shared
@pytest.mark.parametrize(
    ("name", "reason"), [("t5-v1_1-xxl", "encoder-decoder"), ("clip-vit-large-patch14", "encoder")]
)
def test_published_file_that_is_no_decoder(name: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read_config(json.loads((HUB / f"{name}.json").read_text()), name, text_only=True)


@needs_shared
def test_class_defaults_agree_with_the_shared_counts() -> None:
    counts = json.loads((HUB / "transformers_defaults_param_counts.json").read_text())
    counts = next(value for value in counts.values() if isinstance(value, dict))
    cases = {f"{case['id'].split()[1]}.json": case["params"] for case in CASES if case["id"].startswith("default")}
    wrong = {name: params for name, params in cases.items() if counts.get(name, {}).get("params", params) != params}
    assert not wrong
    unread = {name for name, row in counts.items() if "params" in row} - set(cases)
    kinds = {name.removesuffix(".json") for name in unread}
    assert kinds <= set(REFUSED_TYPES) | set(WRAPPERS) | {"gemma4", "deepseek_v2"}  # null top-k in DeepSeek-V2's


@needs_shared
def test_collected_cases() -> None:
    checks = {row["id"]: row["check"] for row in map(json.loads, (SHARED / "cases/dev.jsonl").open()) if "check" in row}
    assert read(GEMMA3_270M).num_params == checks["D05"]["params"]
    assert read(FALCON_7B).num_params == checks["D15"]["params"]
    model = read(QWEN3_MOE, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [i for i, moe in enumerate(model.layer_is_moe) if moe] == checks["D11"]["moe_layers"]
    # D13 counts the balancing bias, a buffer, too: one number an expert in each of 58 layers.
    model = read(DEEPSEEK_V3)
    assert model.num_params + model.num_moe_layers * 256 == checks["D13"]["params"]
    gpt_oss = next(case for case in CASES if case["id"] == "default gpt_oss")
    assert read(gpt_oss["config"]).num_params == checks["D28"]["params"]


# ---- heads -----------------------------------------------------------------------------------------------------
def test_explicit_head_dim_wins_over_hidden_by_heads() -> None:
    assert read(LLAMA, head_dim=16).head_dim == 16
    assert read(LLAMA, head_dim=None).head_dim == 8


def test_head_dim_is_a_decoy_under_latent_attention() -> None:
    assert read(DEEPSEEK_V3, head_dim=1).num_params == read(DEEPSEEK_V3).num_params
    assert read(DEEPSEEK_V3).qk_head_size == 192


@pytest.mark.parametrize("kind", ["qwen3", "gemma", "gpt_oss", "minimax_m2"])
def test_head_dim_is_required_where_it_is_not_hidden_by_heads(kind: str) -> None:
    data = MIXTRAL if kind in ("gpt_oss", "minimax_m2") else LLAMA
    assert "head_dim" in str(refusal(data, model_type=kind))


def test_heads_that_do_not_divide_the_hidden_size() -> None:
    assert "head_dim" in str(refusal(LLAMA, num_attention_heads=10))


def test_null_kv_heads_are_all_heads_but_absent_ones_are_not_guessed() -> None:
    assert read(LLAMA, num_key_value_heads=None).num_kv_heads == 8
    assert read(without(LLAMA, "num_key_value_heads")).num_kv_heads == 8
    assert read(LLAMA, model_type="mistral", num_key_value_heads=None).num_kv_heads == 8
    assert "num_key_value_heads" in str(refusal(without(LLAMA, "num_key_value_heads"), model_type="mistral"))


def test_null_latent_query_rank_is_full_rank_but_an_absent_one_is_not_guessed() -> None:
    model = read(DEEPSEEK_V3, q_lora_rank=None)
    assert model.mla is not None
    assert model.mla.q_lora_rank is None
    assert "q_lora_rank" in str(refusal(without(DEEPSEEK_V3, "q_lora_rank")))


# ---- experts ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"])
def test_every_name_of_the_expert_count(key: str) -> None:
    model = read({**without(MIXTRAL, "num_local_experts"), key: 8})
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.ffn_size, model.moe.top_k) == (8, 96, 2)


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_experts_are_never_read_as_dense(kind: str, key: str) -> None:
    assert "experts" in str(refusal(LLAMA, model_type=kind, head_dim=8, **{key: 8}))


def test_a_class_name_of_experts_on_a_dense_type() -> None:
    assert "mixture of experts" in str(refusal(LLAMA, architectures=["Qwen3MoeForCausalLM"]))


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts_per_tok", "intermediate_size"])
def test_missing_or_null_expert_keys(key: str) -> None:
    refusal(without(MIXTRAL, key))
    refusal(MIXTRAL, **{key: None})


def test_width_of_experts_and_of_dense_layers() -> None:
    model = read(QWEN3_MOE, mlp_only_layers=[0])
    assert model.moe is not None
    assert (model.ffn_size, model.moe.ffn_size, model.moe.dense_layers) == (96, 24, (0,))


def test_a_second_width_of_experts_is_refused() -> None:
    assert "moe_intermediate_size" in str(refusal(MIXTRAL, moe_intermediate_size=48))


def test_dense_layers_first_and_by_frequency() -> None:
    assert read(DEEPSEEK_V3).num_dense_layers == 3
    model = read(DEEPSEEK_V3, num_hidden_layers=8, moe_layer_freq=2)
    assert [i for i, moe in enumerate(model.layer_is_moe) if moe] == [4, 6]
    refusal(DEEPSEEK_V3, moe_layer_freq=[0, 1])
    refusal(DEEPSEEK_V3, first_k_dense_replace=61)
    refusal(without(DEEPSEEK_V3, "first_k_dense_replace"))


def test_layer_kinds_of_the_mlp_must_agree_with_the_dense_count() -> None:
    kinds = ["dense"] * 3 + ["sparse"] * 58
    assert read(DEEPSEEK_V3, mlp_layer_types=kinds).num_params == read(DEEPSEEK_V3).num_params
    assert "first_k_dense_replace" in str(refusal(DEEPSEEK_V3, mlp_layer_types=["dense"] + ["sparse"] * 60))
    assert "layers" in str(refusal(DEEPSEEK_V3, mlp_layer_types=["sparse"]))


def test_sparse_step_counts_from_one() -> None:
    model = read(QWEN3_MOE, decoder_sparse_step=2)
    assert [i for i, moe in enumerate(model.layer_is_moe) if moe] == [1, 3, 5, 7]
    refusal(QWEN3_MOE, mlp_only_layers=[8])
    refusal(QWEN3_MOE, decoder_sparse_step=0)


def test_prediction_layers_stand_apart() -> None:
    model = read(DEEPSEEK_V3)
    assert (model.mtp_layers, model.num_layers) == (1, 61)
    assert model.num_params == read(DEEPSEEK_V3, num_nextn_predict_layers=0).num_params


# ---- ties, biases, norms ---------------------------------------------------------------------------------------
def test_class_default_of_tied_embeddings_where_the_file_is_silent() -> None:
    assert not read(LLAMA).tied_embeddings
    assert read(LLAMA, tie_word_embeddings=True).tied_embeddings
    assert read(GEMMA3_270M).tied_embeddings
    assert read(FALCON_7B).tied_embeddings


def test_biases_are_counted() -> None:
    plain = read(LLAMA).num_params
    assert read(LLAMA, attention_bias=True).num_params - plain == 4 * (64 + 2 * 16 + 64)
    assert read(LLAMA, mlp_bias=True).num_params - plain == 4 * (2 * 96 + 64)
    assert read(LLAMA, model_type="qwen2").num_params - plain == 4 * (64 + 2 * 16)


@pytest.mark.parametrize("key", ["use_bias", "qkv_bias", "use_qk_norm", "qk_layernorm", "lm_head_bias", "kv_lora_rank"])
def test_a_key_that_the_family_does_not_read_but_that_shapes_is_refused(key: str) -> None:
    assert key in str(refusal(LLAMA, **{key: True}))
    assert read(LLAMA, **{key: False}).num_params == read(LLAMA).num_params


def test_activations_that_mean_the_same() -> None:
    assert read(LLAMA, hidden_act="silu", activation="swiglu").activation == "silu"
    assert read(LLAMA, activation="gelu_new", hidden_act="gelu_pytorch_tanh").activation == "gelu"
    assert "two activations" in str(refusal(LLAMA, activation="gelu", hidden_act="silu"))


def test_harmless_and_quantised_files() -> None:
    model = read(LLAMA, quantization_config={"bits": 4}, attention_dropout=0.1, architectures=["LlamaForCausalLM"])
    assert model.num_params == read(LLAMA).num_params
    assert any("quantization_config" in note for note in model.notes)


# ---- spellings and types ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (MIXTRAL, "num_experts", 16),
        (MIXTRAL, "experts_per_token", 4),
        (LLAMA, "n_layer", 5),
        (LLAMA, "ffn_dim", 100),
        (LLAMA, "rope_parameters", {"rope_theta": 5.0}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_two_spellings_that_disagree(data: dict[str, Any], key: str, value: object) -> None:
    assert "mend one" in str(refusal({**data, "rope_theta": 10000.0}, **{key: value}))


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_shape_key_is_named(key: str) -> None:
    assert key in str(refusal(without(LLAMA, key)))
    assert "null" in str(refusal(LLAMA, **{key: None}))


def test_a_misspelt_key_is_suggested() -> None:
    assert "'hidden_sise'" in str(refusal({**without(LLAMA, "hidden_size"), "hidden_sise": 64}))


@pytest.mark.parametrize("value", ["64", True, -64, 0, 64.0, [64] * 4, {}])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_wrong_types(key: str, value: object) -> None:
    assert key in str(refusal(LLAMA, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", "false"),
        ("attention_bias", 1),
        ("rope_theta", "1e4"),
        ("rope_theta", -1),
        ("layer_types", ["full_attention"]),
        ("hidden_act", "quick_gelu"),
        ("model_type", 3),
    ],
)
def test_wrong_values_of_other_keys(key: str, value: object) -> None:
    assert key in str(refusal(LLAMA, **{key: value}))


def test_an_absurd_number_of_layers_ends_at_once() -> None:
    assert "num_hidden_layers" in str(refusal(MIXTRAL, num_hidden_layers=10**15))


def test_pattern_of_local_attention() -> None:
    case = next(case for case in CASES if case["id"] == "small gpt_neo 1")["config"]
    data = without(case, "attention_layers")
    assert read(data, attention_types=[[["global", "local"], 2]]).window_layers == (1, 3)
    for wrong in (None, 3, [[["global"], 3]], [[["global", "mamba"], 2]], [[["local"], "4"]], [["local", 4]]):
        assert "attention_types" in str(refusal(data, attention_types=wrong))


def test_more_kv_heads_than_divide_the_heads() -> None:
    assert "num_kv_heads" in str(refusal(LLAMA, num_key_value_heads=3))


def test_rotary_base_old_and_new_style() -> None:
    assert read(LLAMA, rope_theta=5e5).rope_base == 5e5
    assert read(LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope_base == 5e5
    assert read(GEMMA3_270M, rope_parameters={"full_attention": {"rope_theta": 7e5}}).rope_base == 7e5
    assert read(LLAMA, partial_rotary_factor=0.5).rope_fraction == 0.5
    new_style = {"rope_theta": 10000.0, "rope_type": "default"}  # written beside it since transformers 5, and not read
    assert read(DBRX, rope_parameters=new_style).rope_base == read(DBRX).rope_base == 5e5


# ---- windows ---------------------------------------------------------------------------------------------------
def test_windows() -> None:
    assert read(LLAMA, model_type="mistral", sliding_window=16).window_layers == (0, 1, 2, 3)
    assert read(LLAMA, model_type="mistral", sliding_window=None).window is None
    assert read(LLAMA, sliding_window=16).window is None  # Llama's code has none
    qwen: dict[str, Any] = {**LLAMA, "model_type": "qwen2", "sliding_window": 16, "max_window_layers": 3}
    assert read(qwen, use_sliding_window=False).window is None
    assert read(qwen, use_sliding_window=True).window_layers == (3,)
    assert read(GEMMA3_270M, sliding_window=512).window_layers == tuple(i for i in range(18) if i not in (5, 11, 17))
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(LLAMA, model_type="mistral", layer_types=kinds, sliding_window=16).window_layers == (0, 2)


# ---- refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", sorted(REFUSED_TYPES))
def test_refused_types(kind: str) -> None:
    assert REFUSED_TYPES[kind] in str(refusal(LLAMA, model_type=kind))
    refusal(LLAMA, text_only=True, model_type=kind)


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS))
def test_refused_keys(key: str) -> None:
    assert REFUSED_KEYS[key] in str(refusal(LLAMA, **{key: True}))


def test_tables_do_not_overlap() -> None:
    known = {*FAMILIES, *ALIASES, *WRAPPERS}
    assert not known & set(REFUSED_TYPES)
    assert not set(FOREIGN_KEYS) & set(REFUSED_KEYS)
    assert {target for target, _ in ALIASES.values()} <= set(FAMILIES)


def test_encoder_decoder_without_a_type() -> None:
    assert "encoder-decoder" in str(refusal({"is_encoder_decoder": True, "num_layers": 24, "d_model": 2048}))


def test_layers_that_are_not_attention() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert "linear_attention" in str(refusal(LLAMA, layer_types=kinds))
    assert "linear" in str(refusal(LLAMA, attn_type_list=[0, 1, 1, 1]))


def test_unknown_type_has_a_suggestion() -> None:
    error = refusal(LLAMA, model_type="qwen3moe")
    assert isinstance(error, UnknownNameError)
    assert "qwen3_moe" in str(error)


def test_no_type_and_no_table() -> None:
    assert "model_type" in str(refusal(without(LLAMA, "model_type")))
    with pytest.raises(SpecError, match="expected a table"):
        read_config([], "config.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_another_output_head(name: str) -> None:
    assert name in str(refusal(LLAMA, architectures=[name]))


def test_a_bare_model_gets_a_head_and_a_note() -> None:
    assert any("output matrix" in note for note in read(LLAMA, architectures=["LlamaModel"]).notes)


# ---- multimodal ------------------------------------------------------------------------------------------------
def test_text_part_only_when_asked() -> None:
    data = {"model_type": "mistral3", "text_config": {**LLAMA, "model_type": "mistral"}, "tie_word_embeddings": False}
    data["vision_config"] = {"hidden_size": 32}
    error = refusal(data)
    assert "--text-only" in str(error)
    assert "vision_config" in str(error)
    model = read(data, text_only=True)
    assert model.num_params == read(LLAMA).num_params
    assert "mistral3" in model.notes[0]


@pytest.mark.parametrize("key", ["text_config", "language_config", "llm_config"])
def test_names_of_the_text_part(key: str) -> None:
    data = {"model_type": "some_vlm", "tie_word_embeddings": True, key: LLAMA}
    assert read(data, text_only=True).tied_embeddings
    assert f"{key}.hidden_size" in str(refusal({**data, key: without(LLAMA, "hidden_size")}, text_only=True))


def test_types_of_the_text_part_of_the_thinker() -> None:
    """Counts of the text models of transformers 5.24.0, which hold no head: as with tied embeddings."""
    shape = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    shape |= {"vocab_size": 1024, "tie_word_embeddings": True}
    dense = {**shape, "model_type": "qwen2_5_omni_text", "intermediate_size": 1000}
    data = {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": dense}}
    assert read(data, text_only=True).num_params == 9_297_408
    moe = {**shape, "model_type": "qwen3_omni_moe_text", "num_experts": 128, "num_experts_per_tok": 8}
    moe |= {"moe_intermediate_size": 768, "intermediate_size": 1000}
    data = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": moe}}
    assert read(data, text_only=True).num_params == 607_392_768


def test_text_part_below_the_thinker() -> None:
    data = {"model_type": "qwen2_5_omni", "tie_word_embeddings": False, "thinker_config": {"text_config": LLAMA}}
    assert read(data, text_only=True).num_params == read(LLAMA).num_params


def test_ties_of_a_multimodal_file() -> None:
    data: dict[str, Any] = {"model_type": "mistral3", "text_config": LLAMA}
    assert "tie_word_embeddings" in str(refusal(data, text_only=True))
    inner = {**LLAMA, "tie_word_embeddings": True}
    assert read({**data, "text_config": inner}, text_only=True).tied_embeddings
    assert "disagrees" in str(refusal({**data, "text_config": inner}, text_only=True, tie_word_embeddings=False))


@pytest.mark.parametrize(
    ("kind", "version", "outer", "inner", "tied"),
    [
        ("mistral3", "4.50.0.dev0", None, None, False),  # Mistral Small 3.1: the text part's class decides
        ("mistral3", "5.24.0", None, None, True),  # the class of the whole decides
        ("mistral3", "5.24.0", True, False, True),
        ("mistral3", "4.50.0", None, True, True),
        ("mistral3", "5.24.0", None, True, True),
        ("internvl", "4.52.0", None, None, False),
        ("kimi_k25", "5.24.0", None, None, True),
        ("some_vlm", "4.40.0", None, None, False),
        ("some_vlm", "5.0.0", None, True, True),
        ("llava", None, None, None, False),
        ("mistral3", None, None, None, None),
        ("mistral3", "5.24.0", None, False, None),
        ("mistral3", "4.50.0", True, False, None),
        ("mistral3", "5.24.0", False, True, None),
        ("some_vlm", "5.0.0", None, None, None),
    ],
)
def test_which_level_says_whether_embeddings_are_tied(
    kind: str, version: str | None, outer: bool | None, inner: bool | None, tied: bool | None
) -> None:
    """What the configuration classes of transformers 5.24.0 made of each; None: nobody can say, so it is refused."""
    text = {**LLAMA, "tie_word_embeddings": inner}
    data = {"model_type": kind, "transformers_version": version, "tie_word_embeddings": outer, "text_config": text}
    if tied is None:
        assert "tie_word_embeddings" in str(refusal(data, text_only=True))
    else:
        assert read(data, text_only=True).tied_embeddings is tied


def test_both_levels_must_agree() -> None:
    data = {"model_type": "qwen2_5_vl", "tie_word_embeddings": False, "text_config": {**LLAMA, "model_type": "qwen2"}}
    assert "text_config.hidden_size" in str(refusal(data, text_only=True, hidden_size=128))


def test_flat_multimodal_file() -> None:
    data = {**LLAMA, "model_type": "qwen2_vl", "vision_config": {"depth": 2}}
    assert "--text-only" in str(refusal(data))
    assert read(data, text_only=True).num_params == read(LLAMA, model_type="qwen2").num_params


def test_plain_type_with_a_vision_tower() -> None:
    assert "--text-only" in str(refusal(LLAMA, vision_config={"depth": 2}))


def test_hybrid_text_part_is_refused_for_what_it_is() -> None:
    text = {**LLAMA, "model_type": "qwen3_5_text"}
    assert "linear-attention" in str(refusal({"model_type": "new_vlm", "text_config": text}))


# ---- names -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("models/my-llama/config.json", "my-llama"),
        ("my-llama.json", "my-llama"),
        ("my-2.5-7b", "my-2.5-7b"),
        ("config.json", "llama"),
    ],
)
def test_name(where: str, name: str) -> None:
    assert read_config(LLAMA, where).name == name


# ---- published files -------------------------------------------------------------------------------------------
def test_class_defaults_fill_published_files_only() -> None:
    """gemma-3-4b's text part leaves out heads, head size and vocabulary; the class has them."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240}
    data = {"model_type": "gemma3", "text_config": text, "vision_config": {"depth": 2}}
    model = read({**data, "architectures": ["Gemma3ForConditionalGeneration"]}, text_only=True)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size) == (8, 4, 256, 262208)
    assert any("num_attention_heads 8" in note and "default" in note for note in model.notes)
    assert "num_attention_heads" in str(refusal(data, text_only=True))


def test_a_slip_in_a_published_file_is_not_filled() -> None:
    data = {**without(LLAMA, "hidden_size"), "hidden_sise": 64, "transformers_version": "4.40"}
    assert "'hidden_sise'" in str(refusal(data))
    assert read({**without(LLAMA, "hidden_size"), "n_embd": 64, "architectures": ["X"]}).hidden_size == 64
    assert "null" in str(refusal(LLAMA, architectures=["X"], vocab_size=None))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("qwen3_moe", "use_qk_norm", True),
        ("qwen2", "qkv_bias", True),
        ("qwen2", "attention_bias", True),
        ("mixtral", "moe_intermediate_size", 96),
        ("mixtral", "moe_layer_freq", 1),
        ("llama", "num_experts", 1),
        ("llama", "num_shared_expert", [1, 1, 1, 1]),
        ("qwen3_moe", "n_shared_experts", 0),
    ],
)
def test_keys_that_say_what_the_family_has_anyway(kind: str, key: str, value: object) -> None:
    data = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}.get(kind, {**LLAMA, "model_type": kind})
    assert read(data, **{key: value}).num_params == read(data).num_params


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("qwen3_moe", "n_shared_experts", 1),
        ("mixtral", "moe_intermediate_size", 48),
        ("mixtral", "moe_layer_freq", 2),
        ("qwen2", "mlp_bias", True),
        ("qwen2", "use_bias", True),
        ("llama", "num_experts", 2),
        ("llama", "qk_layernorm", True),
    ],
)
def test_keys_that_say_something_else_are_refused(kind: str, key: str, value: object) -> None:
    data = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}.get(kind, {**LLAMA, "model_type": kind})
    assert key in str(refusal(data, **{key: value}))


def test_a_list_of_equal_values_is_one_value() -> None:
    data = {**LLAMA, "model_type": "hunyuan_v1_moe", "head_dim": 8, "num_experts": 4, "moe_topk": [2] * 4}
    data |= {"num_shared_expert": [1] * 4, "moe_intermediate_size": [96] * 4, "use_qk_norm": True}
    model = read(data)
    assert model.moe is not None and (model.moe.top_k, model.moe.shared_ffn_size) == (2, 96)
    assert "moe_topk" in str(refusal(data, moe_topk=[2, 2, 1, 2]))
    assert "moe_intermediate_size" in str(refusal(data, moe_intermediate_size=[96, 96, 96, 48]))


OPT_350M = {"model_type": "opt", "num_hidden_layers": 24, "hidden_size": 1024, "ffn_dim": 4096, "vocab_size": 50272}
OPT_350M |= {"num_attention_heads": 16, "max_position_embeddings": 2048, "word_embed_proj_dim": 512}


def test_an_embedding_of_its_own_width() -> None:
    model = read(OPT_350M, do_layer_norm_before=False)
    assert (model.num_params, model.embedding_size) == (331_196_416, 512)
    assert model.embedding_and_head_params == 50272 * 512
    assert read(OPT_350M, word_embed_proj_dim=1024).embedding_size is None
    p = parsolve.Problem("h100-sxm:1x8", model, seq_len=2048, gbs=64, without={"memory"})
    assert not parsolve.check(parsolve.Problem(p.cluster, model, seq_len=2048, gbs=64, framework="deepspeed"), "zero=3")
    with pytest.raises(NotExpressibleError, match="another width"):
        launch("megatron", p, parse_config("tp=1", p)[0])


def test_a_scoring_function_that_no_code_reads() -> None:
    model = read({**without(DEEPSEEK_V3, "head_dim"), "scoring_func": "noaux_tc"})
    assert model.moe is not None and model.moe.router_score == "sigmoid"


def test_refusals_name_the_model_file_where_one_would_do() -> None:
    for kind in ("bitnet", "openelm", "my_own_type"):
        assert "parsolve schema model" in str(refusal(LLAMA, model_type=kind))
    assert "parsolve schema model" not in str(refusal(LLAMA, model_type="t5"))


def test_a_prediction_layer_of_another_kind_than_the_last_is_noted() -> None:
    """ERNIE 4.5's have a plain MLP (vLLM, ernie_mtp.py), GLM-4.5's and DeepSeek-V3's experts like the last layer."""
    found = {}
    for case in CASES:
        kind = case["config"].get("model_type")
        if case["config"].get("num_nextn_predict_layers") and kind in ("ernie4_5_moe", "glm4_moe", "deepseek_v3"):
            model = read_config(case["config"], "x")
            found[kind] = any("plain MLP" in note for note in model.notes)
            assert model.mtp_layers and model.mtp_params
    assert found == {"ernie4_5_moe": True, "glm4_moe": False, "deepseek_v3": False}
