"""One row per architecture: what its config.json says, and what its model code fixes without a key.

Each row was compared with the parameters that the model code of transformers 5.24.0 creates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from parsolve.huggingface.family import Experts, Family, Fields, Flags, Window
from parsolve.huggingface.reader import ConfigReader
from parsolve.huggingface.rules import (
    after_first_dense,
    all_but_every,
    even_below_max_window_layers,
    from_max_window_layers,
    interleaved,
    rope_layers,
    sparse_step,
    start_to_end,
)

NOTHING: Mapping[str, object] = {}


def _falcon(c: ConfigReader, m: Fields) -> Fields:
    """Three generations: multi-head, multi-query (7B), grouped with two norms (40B, 180B) or one (11B)."""
    new = c.flag("new_decoder_architecture", False)
    alone = 1 if c.flag("multi_query", True) else m["num_heads"]
    norms = c.integer("num_ln_in_parallel_attn", 2 if new else 1) if c.flag("parallel_attn", True) else 2
    return {"num_kv_heads": c.integer("num_kv_heads") if new else alone, "norms_per_layer": 2 if norms == 2 else 1}


def _bigcode(c: ConfigReader, m: Fields) -> Fields:
    return {"num_kv_heads": 1 if c.flag("multi_query", True) else m["num_heads"]}


def _opt(c: ConfigReader, m: Fields) -> Fields:
    """Two extra rows of positions; an embedding of a width of its own (350M)."""
    hidden, positions = c.integer("hidden_size"), c.integer("max_positions")
    width = c.integer("word_embed_proj_dim", hidden)
    projected: Fields = {} if width == hidden else {"embedding_size": width}
    final = c.flag("do_layer_norm_before", True) and not c.flag("_remove_final_layer_norm", False)
    affine = c.flag("layer_norm_elementwise_affine", True)
    norms: Fields = {} if affine else {"norms_per_layer": 0}
    return {"max_positions": positions + 2, "final_norm": final and affine, **norms, **projected}


def _persimmon(c: ConfigReader, m: Fields) -> Fields:
    """Norms of queries and keys with biases, which HEAD_NORM does not count."""
    size = c.integer("hidden_size") // c.integer("num_heads")
    return {**HEAD_NORM, "extra_layer_params": 2 * size} if c.flag("qk_layernorm", True) else {}


def _internlm3(c: ConfigReader, m: Fields) -> Fields:
    """Two names of each switch, which the model code does not take apart either."""
    for old, new in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias")):
        if c.get(old) is not None and c.get(new) not in (None, c.get(old)):
            raise c.error(old, f"disagrees with {new}; mend one")
    return {}


def _gpt_neo(c: ConfigReader, m: Fields) -> Fields:
    """Alternating global and local attention."""
    layers = c.integer("num_layers")
    kinds = c.names("attention_layers", layers)
    if kinds is None:
        pattern = c.get("attention_types")
        try:
            kinds = [kind for group, times in pattern for kind in group * min(times, layers)]  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise c.error("attention_types", "must be a list of [[kinds], times]") from None
    if len(kinds) != layers or not all(kind in ("global", "local") for kind in kinds):
        raise c.error("attention_types", f"must name global or local for each of {layers} layers")
    local = tuple(i for i, kind in enumerate(kinds) if kind == "local")
    return {"window": c.integer("window_size", 256), "window_layers": local} if local else {}


LAYER_NORM: Fields = {"norm": "layer", "norm_bias": True}
ALL_BIASES: Fields = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
CLASSIC: Fields = {**LAYER_NORM, **ALL_BIASES, "gated_mlp": False, "activation": "gelu"}
GPT2: Fields = {**CLASSIC, "position": "learned"}
GPTJ: Fields = {**LAYER_NORM, "gated_mlp": False, "activation": "gelu", "mlp_bias": True, "norms_per_layer": 1}
GPTJ |= {"head_bias": True}
HEAD_NORM: Fields = {"qk_norm": "head"}
FULL_NORM: Fields = {"qk_norm": "full"}
GEMMA: Fields = {"activation": "gelu"}

QKV = {"qkv_bias": True}
QKVO = {"qkv_bias": True, "attention_out_bias": True}
ATTENTION_BIAS: Flags = {"attention_bias": (False, QKVO)}
INPUT_BIAS: Flags = {"attention_bias": (False, QKV)}
BOTH_BIASES: Flags = {**ATTENTION_BIAS, "mlp_bias": (False, {"mlp_bias": True})}

BALANCED: Fields = {"score_correction_bias": True}
DEEPSEEK_EXPERTS = Experts(layers=after_first_dense, shared="count", score="sigmoid", fixed=BALANCED)
QWEN_WINDOW = Window(from_max_window_layers, 4096, switch="use_sliding_window")

XIELU = "the activation xIELU, with two parameters a layer, is costed as a squared ReLU"
LLAMA = Family(kv_heads="optional", flags=BOTH_BIASES)
MISTRAL = Family(window=Window(size=4096))
QWEN3 = Family(head_dim="key", fixed=HEAD_NORM, flags=ATTENTION_BIAS, window=QWEN_WINDOW)
GEMMA2 = Family(
    tied=True,
    head_dim="key",
    fixed={**GEMMA, "norms_per_layer": 4},
    flags=ATTENTION_BIAS,
    window=Window(all_but_every(2), 4096),
)
DEEPSEEK_V3 = Family(mla=True, kv_heads="optional", flags=ATTENTION_BIAS, experts=DEEPSEEK_EXPERTS)
GLM = Family(head_dim="key", flags={"attention_bias": (True, QKV)}, rope_fraction=0.5)
GLM4_MOE = Family(
    head_dim="floor",
    flags={**INPUT_BIAS, "use_qk_norm": (False, HEAD_NORM)},
    experts=DEEPSEEK_EXPERTS,
    rope_fraction=0.5,
)
OLMO2 = Family(kv_heads="optional", fixed=FULL_NORM, flags=ATTENTION_BIAS)
OLMOE_EXPERTS = Experts(width="intermediate_size")
EXAONE4 = Family(fixed=HEAD_NORM, window=Window(all_but_every(4), 4096))
GRANITE_MOE = Family(kv_heads="optional", flags=ATTENTION_BIAS, experts=OLMOE_EXPERTS)
MIXTRAL = Family(experts=OLMOE_EXPERTS, window=Window(), rope_base=1e6)
MPT_REQUIRED = {
    "no_bias": True,
    "attn_config.alibi": True,
    "attn_config.qk_ln": False,
    "attn_config.attn_type": "multihead_attention",
    "expansion_ratio": 4,
}

FAMILIES: dict[str, Family] = {
    # Llama and its kin: RMS norms, gated MLP
    "llama": LLAMA,
    "granite": LLAMA,
    "arcee": replace(LLAMA, fixed={"gated_mlp": False, "activation": "relu2"}),
    "exaone": replace(LLAMA, kv_heads="key", rope_base=5e5),
    "internlm3": Family(
        head_dim="key",
        flags={**BOTH_BIASES, "qkv_bias": (False, QKVO), "bias": (False, {"mlp_bias": True})},
        extra=_internlm3,
    ),
    "smollm3": replace(LLAMA, tied=True, kv_heads="key", rope_base=2e6),
    "helium": Family(kv_heads="key", head_dim="derived", flags={**BOTH_BIASES, **INPUT_BIAS}, rope_base=1e5),
    "cwm": Family(
        head_dim="key",
        flags={"mlp_bias": (False, {"mlp_bias": True})},
        window=Window(lambda c, n: [i for i in range(n) if i % 4]),
        rope_base=1e6,
    ),
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "ministral3": Family(head_dim="key", window=Window(), rope_base=1e6),
    "seed_oss": Family(
        head_dim="key",
        flags={
            "attention_bias": (True, QKV),
            "attention_out_bias": (False, {"attention_out_bias": True}),
            "mlp_bias": (False, {"mlp_bias": True}),
        },
    ),
    "ernie4_5": Family(tied=True, head_dim="key", flags={"use_bias": (False, ALL_BIASES)}, rope_base=5e5),
    "qwen2": Family(fixed=QKV, window=QWEN_WINDOW),
    "qwen3": QWEN3,
    "phi3": Family(kv_heads="optional", window=Window()),
    "glm": GLM,
    "glm4": replace(GLM, fixed={"norms_per_layer": 4}),
    "glm4v_text": replace(GLM, head_dim="optional", fixed={"norms_per_layer": 4}),
    "exaone4": EXAONE4,
    "hunyuan_v1_dense": Family(
        kv_heads="optional", head_dim="key", fixed=HEAD_NORM, flags=ATTENTION_BIAS, require={"use_qk_norm": True}
    ),
    "olmo": replace(LLAMA, flags=ATTENTION_BIAS, fixed={"norm": "layer", "norms_per_layer": 0, "final_norm": False}),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, window=Window(all_but_every(4), 4096), rope_base=5e5),
    "apertus": Family(
        kv_heads="optional",
        fixed={**HEAD_NORM, "gated_mlp": False, "extra_layer_params": 2, "notes": (XIELU,)},
        flags=ATTENTION_BIAS,
        rope_base=12e6,
    ),
    "nanochat": replace(
        LLAMA,
        flags=ATTENTION_BIAS,
        fixed={"gated_mlp": False, "activation": "relu2", "norms_per_layer": 0, "final_norm": False},
    ),
    "gemma": Family(tied=True, head_dim="key", fixed=GEMMA, flags=ATTENTION_BIAS),
    "gemma2": GEMMA2,
    "vaultgemma": replace(GEMMA2, fixed=GEMMA),
    "gemma3_text": replace(
        GEMMA2, fixed={**GEMMA2.fixed, **HEAD_NORM}, window=Window(all_but_every(6), 4096), rope_base=1e6
    ),
    "youtu": replace(DEEPSEEK_V3, tied=True, experts=None),
    # layer norms, a gated MLP or none
    "persimmon": Family(
        kv_heads="all",
        head_dim="derived",
        fixed={**CLASSIC, "activation": "relu2"},
        rope_base=25000.0,
        rope_fraction=0.5,
        extra=_persimmon,
    ),
    "stablelm": Family(
        head_dim="derived",
        fixed=LAYER_NORM,
        flags={
            "use_qkv_bias": (False, QKV),
            "qk_layernorm": (False, FULL_NORM),
            "use_parallel_residual": (False, {"norms_per_layer": 1}),
        },
        rope_fraction=0.25,
    ),
    "cohere": Family(
        tied=True,
        kv_heads="optional",
        fixed={"norm": "layer", "norms_per_layer": 1},
        flags={**ATTENTION_BIAS, "use_qk_norm": (False, FULL_NORM)},
        rope_base=5e5,
    ),
    "cohere2": Family(
        tied=True,
        kv_heads="optional",
        head_dim="derived",
        fixed={"norm": "layer", "norms_per_layer": 1},
        flags=ATTENTION_BIAS,
        window=Window(all_but_every(4), 4096),
    ),
    "jais2": Family(
        kv_heads="optional",
        fixed={**LAYER_NORM, "gated_mlp": False, "activation": "relu2"},
        flags={"attention_bias": (True, QKVO), "mlp_bias": (True, {"mlp_bias": True})},
        rope_base=5e5,
    ),
    "nemotron": Family(
        kv_heads="optional",
        fixed={**LAYER_NORM, "gated_mlp": False, "activation": "relu2"},
        flags=BOTH_BIASES,
        rope_fraction=0.5,
    ),
    "starcoder2": Family(
        tied=True,
        head_dim="derived",
        fixed={**LAYER_NORM, "gated_mlp": False, "activation": "gelu"},
        flags={"use_bias": (True, ALL_BIASES)},
        window=Window(),
    ),
    "phi": Family(
        kv_heads="optional",
        head_dim="derived",
        fixed={**CLASSIC, "norms_per_layer": 1, "head_bias": True},
        require={"qk_layernorm": False},
        rope_fraction=0.5,
    ),
    "gpt2": Family(tied=True, kv_heads="all", head_dim="derived", ffn_factor=4, fixed=GPT2),
    "gpt_bigcode": Family(tied=True, kv_heads="all", head_dim="derived", ffn_factor=4, fixed=GPT2, extra=_bigcode),
    "gpt_neo": Family(
        tied=True,
        kv_heads="all",
        head_dim="derived",
        ffn_factor=4,
        fixed={**GPT2, "qkv_bias": False},
        extra=_gpt_neo,
    ),
    "gpt_neox": Family(
        kv_heads="all",
        head_dim="derived",
        fixed={**LAYER_NORM, "gated_mlp": False, "activation": "gelu", "mlp_bias": True},
        flags={"attention_bias": (True, QKVO), "use_parallel_residual": (True, NOTHING)},
        rope_fraction=0.25,
    ),
    "gptj": Family(kv_heads="all", head_dim="derived", ffn_factor=4, fixed=GPTJ),
    "codegen": Family(kv_heads="all", head_dim="derived", ffn_factor=4, fixed=GPTJ),
    "opt": Family(
        tied=True,
        kv_heads="all",
        head_dim="derived",
        fixed={**LAYER_NORM, "gated_mlp": False, "activation": "relu", "position": "learned"},
        flags={"enable_bias": (True, ALL_BIASES)},
        extra=_opt,
    ),
    "xglm": Family(
        tied=True,
        kv_heads="all",
        head_dim="derived",
        fixed={**CLASSIC, "position": "none", "notes": ("sinusoidal positions, which have no parameters",)},
    ),
    "bloom": Family(
        tied=True,
        kv_heads="all",
        head_dim="derived",
        ffn_factor=4,
        fixed={**CLASSIC, "position": "alibi", "embedding_norm": True},
    ),
    "falcon": Family(
        tied=True,
        kv_heads="all",
        head_dim="derived",
        ffn_factor=4,
        fixed={**LAYER_NORM, "gated_mlp": False, "activation": "gelu"},
        flags={"bias": (False, ALL_BIASES), "alibi": (False, {"position": "alibi"})},
        extra=_falcon,
    ),
    "mpt": Family(
        tied=True,
        kv_heads="all",
        head_dim="derived",
        ffn_factor=4,
        fixed={"norm": "layer", "gated_mlp": False, "activation": "gelu", "position": "alibi"},
        require=MPT_REQUIRED,
    ),
    # mixtures of experts
    "mixtral": MIXTRAL,
    "phimoe": replace(
        MIXTRAL,
        fixed=LAYER_NORM,
        flags={**ATTENTION_BIAS, "lm_head_bias": (False, {"head_bias": True})},
    ),
    "minimax_m2": Family(
        head_dim="key",
        fixed=FULL_NORM,
        require={"use_qk_norm": True, "qk_norm_type": "per_layer"},
        experts=Experts("intermediate_size", score="sigmoid", fixed=BALANCED),
        rope_base=5e6,
        rope_fraction=0.5,
    ),
    "qwen2_moe": Family(
        flags={"qkv_bias": (True, QKV)},
        experts=Experts(layers=sparse_step, shared="shared_expert_intermediate_size", fixed={"shared_gate": True}),
        window=Window(even_below_max_window_layers, 4096, switch="use_sliding_window"),
    ),
    "qwen3_moe": Family(
        fixed=HEAD_NORM,
        flags=ATTENTION_BIAS,
        experts=Experts(layers=sparse_step),
        window=Window(size=4096, switch="use_sliding_window"),
    ),
    "gpt_oss": Family(
        head_dim="key",
        fixed={"attention_sinks": True},
        flags={"attention_bias": (True, QKVO)},
        experts=Experts("intermediate_size", fixed={"expert_bias": True, "router_bias": True}),
        window=Window(all_but_every(2), 128),
        rope_base=150000.0,
    ),
    "olmoe": replace(OLMO2, experts=OLMOE_EXPERTS),
    "flex_olmo": replace(OLMO2, experts=OLMOE_EXPERTS, rope_base=5e5),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": replace(GRANITE_MOE, experts=Experts("intermediate_size", shared="shared_intermediate_size")),
    "dbrx": Family(
        head_dim="derived",
        fixed={"norm": "layer"},
        experts=Experts("ffn_config.ffn_hidden_size"),
        extra=lambda c, m: {"rope_base": c.number("attn_config.rope_theta", 10000.0)},
    ),
    "ernie4_5_moe": Family(
        tied=True,
        require={"use_bias": False},
        experts=Experts(layers=start_to_end, shared="count", fixed={**BALANCED, "score_correction_params": True}),
        rope_base=5e5,
        plain_mtp=True,
    ),
    "deepseek_v2": replace(
        DEEPSEEK_V3, require={"mlp_bias": False}, experts=Experts(layers=after_first_dense, shared="count")
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "mistral4": replace(DEEPSEEK_V3, experts=Experts(layers=after_first_dense, shared="count")),
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": DEEPSEEK_V3,
    "dots1": Family(
        fixed=HEAD_NORM, flags=ATTENTION_BIAS, experts=DEEPSEEK_EXPERTS, window=Window(from_max_window_layers, 4096)
    ),
    "exaone_moe": replace(EXAONE4, experts=DEEPSEEK_EXPERTS),
    "hy_v3": Family(
        head_dim="key",
        fixed=HEAD_NORM,
        flags=ATTENTION_BIAS,
        require={"mlp_bias": False},
        experts=DEEPSEEK_EXPERTS,
        rope_base=11158840.0,
    ),
    "hunyuan_v1_moe": Family(
        kv_heads="optional",
        head_dim="key",
        fixed=HEAD_NORM,
        flags=ATTENTION_BIAS,
        require={"use_qk_norm": True},
        experts=Experts("intermediate_size", shared="one"),
    ),
    "solar_open": Family(
        head_dim="key",
        flags=INPUT_BIAS,
        experts=Experts(shared="count", score="sigmoid", fixed=BALANCED),
        rope_base=1e6,
    ),
    "llama4_text": Family(
        head_dim="key",
        flags={**ATTENTION_BIAS, "use_qk_norm": (True, NOTHING)},
        experts=Experts("intermediate_size", layers=interleaved, shared="one", score="sigmoid"),
        window=Window(rope_layers, 8192, key="attention_chunk_size"),
        rope_base=5e5,
        extra=lambda c, m: {"ffn_size": c.integer("intermediate_size_mlp")},
    ),
}

# Other names of a family, with the keys that the name implies.
ALIASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "kimi_k2": ("deepseek_v3", NOTHING),
    "code_llama": ("llama", NOTHING),
    "gpt-sw3": ("gpt2", NOTHING),
    "RefinedWebModel": ("falcon", NOTHING),
    "RefinedWeb": ("falcon", {"new_decoder_architecture": True}),
    "qwen2_vl_text": ("qwen2", NOTHING),
    "qwen2_5_vl_text": ("qwen2", NOTHING),
    "qwen3_vl_text": ("qwen3", NOTHING),
    "qwen3_vl_moe_text": ("qwen3_moe", NOTHING),
    "qwen2_5_omni_text": ("qwen2", NOTHING),
    "qwen3_omni_moe_text": ("qwen3_moe", NOTHING),
    "glm4v_moe_text": ("glm4_moe", NOTHING),
}


@dataclass(frozen=True)
class Wrapper:
    """A multimodal type: the family of its text part where that part does not say, tied embeddings where silent."""

    text: str | None = None
    tied: bool | None = None


WRAPPERS: dict[str, Wrapper] = {
    "llama4": Wrapper("llama4_text", False),
    "gemma3": Wrapper("gemma3_text", True),
    "qwen2_vl": Wrapper("qwen2_vl_text", False),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", False),
    "qwen3_vl": Wrapper("qwen3_vl_text", False),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text", False),
    "glm4v": Wrapper("glm4v_text", False),
    "glm4v_moe": Wrapper("glm4v_moe_text", False),
    **dict.fromkeys(("mistral3", "internvl", "kimi_k25"), Wrapper(None, True)),
    **dict.fromkeys(("llava", "vipllava", "video_llava", "llava_next_video", "fuyu"), Wrapper(None, False)),
    **dict.fromkeys(("idefics3", "smolvlm", "qwen2_audio", "voxtral"), Wrapper(None, False)),
    **dict.fromkeys(("cohere2_vision", "got_ocr2"), Wrapper(None, True)),
    "llava_next": Wrapper(None, False),
    "llava_onevision": Wrapper(None, False),
    "paligemma": Wrapper(None, True),
    "qwen2_5_omni": Wrapper(),
    "qwen3_omni_moe": Wrapper(),
}
