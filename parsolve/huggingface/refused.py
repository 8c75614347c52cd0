"""What is refused by name: architectures and keys whose parameters the model spec cannot hold."""

from __future__ import annotations

from collections.abc import Mapping

_HYBRID = "mixes attention with state-space, linear-attention or convolution layers, which are not modelled"
_INDEXED = "has sparse attention with an indexer of its own, which is not modelled"
_SEQ2SEQ = "is an encoder-decoder, which is not supported (only decoder-only models are)"
_ENCODER = "is an encoder, not a decoder-only language model"
_UNEVEN = "differs in size from layer to layer, which is not supported"
_OTHER = "has layers with parameters that are not modelled"


def _rows(reason: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), reason)


# model_type: why; completes "<model_type> ...".
REFUSED_TYPES: dict[str, str] = {
    **_rows(_SEQ2SEQ, "t5 mt5 umt5 byt5 longt5 bart mbart pegasus marian m2m_100 switch_transformers nllb-moe"),
    **_rows(_SEQ2SEQ, "whisper blenderbot bigbird_pegasus led prophetnet encoder-decoder t5gemma t5gemma2"),
    **_rows(_ENCODER, "bert roberta distilbert electra deberta deberta-v2 albert xlm-roberta modernbert vit"),
    **_rows(_ENCODER, "clip clip_text_model clip_vision_model siglip siglip2"),
    **_rows(_HYBRID, "mamba mamba2 jamba bamba zamba zamba2 falcon_mamba falcon_h1 nemotron_h granitemoehybrid"),
    **_rows(_HYBRID, "lfm2 lfm2_moe recurrent_gemma rwkv xlstm kimi_linear minimax minimax_text_01 olmo_hybrid"),
    **_rows(_HYBRID, "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text"),
    **_rows(_INDEXED, "deepseek_v32 deepseek_v4 glm_moe_dsa"),
    **_rows(_UNEVEN, "deci nemotron-nas openelm"),
    **_rows(_OTHER, "afmoe doge diffllama gemma3n gemma3n_text gemma4 gemma4_text mllama"),
    "bitnet": "has norms inside attention and MLP, which are not modelled",
    "jetmoe": "routes the attention heads, too (mixture of attention), which is not modelled",
    "longcat_flash": "has two attention blocks a layer and experts that do nothing, which are not modelled",
}

# Keys refused in any file, unless null, false, zero or empty; completes "the model ...".
REFUSED_KEYS: dict[str, str] = {
    **_rows(_SEQ2SEQ, "is_encoder_decoder num_decoder_layers decoder_layers encoder_layers"),
    **_rows("has cross-attention, which is not modelled", "add_cross_attention cross_attention_layers"),
    **_rows(_HYBRID, "hybrid_override_pattern layers_block_type full_attn_idxs attn_layer_indices attn_layer_period"),
    **_rows(_HYBRID, "full_attention_interval linear_attn_config linear_num_key_heads linear_num_value_heads"),
    **_rows(_HYBRID, "ssm_state_size ssm_cfg mamba_num_heads mamba_d_state mamba_expand mamba_n_heads conv_L_cache"),
    **_rows(_INDEXED, "index_topk index_n_heads index_head_dim sparse_attention_config compress_ratios"),
    **_rows(_UNEVEN, "block_configs num_query_heads num_kv_shared_layers use_cla"),
    **_rows("attends in both directions, as encoders do, which is not supported", "use_bidirectional_attention"),
    **_rows(_OTHER, "attn_output_gate zero_expert_num"),
}

_BIAS = "biases change the number of parameters"
_NORM = "norms of queries and keys change the number of parameters"
_EXPERTS = "experts change the number of parameters"
_LATENT = "latent attention changes the number of parameters"

_ALL_BIASES = ("qkv_bias", "attention_out_bias", "mlp_bias")
_BIASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias"), ("qkv_bias",)),
    **dict.fromkeys(("attention_out_bias", "o_bias"), ("attention_out_bias",)),
    "mlp_bias": ("mlp_bias",),
    "lm_head_bias": ("head_bias",),
}
"""The fields that a bias key is about; any other is about all biases."""
_COUNTS = frozenset(
    {
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_topk"),
        *("experts_per_token", "moe_k", "n_shared_experts", "num_shared_experts", "num_shared_expert"),
        "moe_num_shared_experts",
    }
)

# Keys that some family reads: refused where this family does not, unless null, false, zero or empty.
FOREIGN_KEYS: dict[str, str] = {
    **_rows(_BIAS, "attention_bias attention_out_bias mlp_bias use_bias bias qkv_bias use_qkv_bias add_qkv_bias"),
    **_rows(_BIAS, "add_bias_linear enable_bias lm_head_bias o_bias"),
    **_rows(_NORM, "use_qk_norm qk_layernorm qk_norm"),
    **_rows(_EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts moe_intermediate_size"),
    **_rows(_EXPERTS, "num_experts_per_tok experts_per_token moe_k moe_topk n_shared_experts num_shared_experts"),
    **_rows(_EXPERTS, "num_shared_expert moe_num_shared_experts shared_expert_intermediate_size ffn_config"),
    **_rows(_EXPERTS, "shared_intermediate_size first_k_dense_replace mlp_layer_types mlp_only_layers moe_layers"),
    **_rows(_EXPERTS, "interleave_moe_layer_step intermediate_size_mlp expert_layer_period moe_layer_freq"),
    **_rows(_LATENT, "q_lora_rank kv_lora_rank"),
}


def with_hint(reason: str) -> str:
    """The reason, and for decoders that a model file could describe, this way out."""
    if reason in (_SEQ2SEQ, _ENCODER):
        return reason
    return f"{reason}; if a plain transformer comes near, write a model file (parsolve schema model)"


def agrees(key: str, value: object, fields: Mapping[str, object]) -> bool:
    """A key that the family does not read says what the family has anyway: nothing is left to guess."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if FOREIGN_KEYS[key] == _NORM:
        return value is True and fields.get("qk_norm", "none") != "none"
    if FOREIGN_KEYS[key] == _BIAS:
        return value is True and all(fields.get(name) for name in _BIASES.get(key, tuple(_ALL_BIASES)))
    if FOREIGN_KEYS[key] != _EXPERTS or isinstance(value, bool) or not isinstance(value, int):
        return False
    moe = fields.get("moe")
    if not isinstance(moe, dict):
        return key in _COUNTS and value == 1  # one expert is a plain MLP
    known = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), "num_experts"),
        **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk"), "top_k"),
        "moe_intermediate_size": "ffn_size",
        **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), "shared_ffn_size"),
    }
    if key in known:
        return bool(value == moe[known[key]])
    if key in _COUNTS:
        return bool(value * moe["ffn_size"] == moe["shared_ffn_size"])
    return value == 1 and not moe["dense_layers"]  # every layer
