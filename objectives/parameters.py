"""How many parameters one rank holds of each kind of block. Used by memory, communication and the optimizer step.

Matrices are divided over tensor parallelism; norms, routers and MLA's down projections are replicated, as in
Megatron-Core. With more tensor-parallel ranks than key/value heads the weights are still divided over all ranks, while
every rank computes with one whole kv head (its GPTModel on 16 ranks: tests/test_memory.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.problem import Instance


def padded_vocab(p: Instance, tp: Any) -> Any:
    """Vocabulary rounded up to a multiple of 128*tp (Megatron's --make-vocab-size-divisible-by 128)."""
    block = 128 * tp
    return np.ceil(p.model.vocab_size / block) * block


def loss_vocab(p: Instance, tp: Any) -> Any:
    """Vocabulary entries whose logits one rank holds in the loss: its share, or all when they are gathered."""
    vocab = padded_vocab(p, tp)
    return vocab / tp if p.parallel_loss else vocab


def kv_heads_per_rank(p: Instance, tp: Any) -> Any:
    """Key/value heads that a rank computes with: kv heads / tp, at least one (gathered)."""
    return np.maximum(1.0, p.model.num_kv_heads / tp)


def attention_params(p: Instance, tp: Any) -> Any:
    """Attention and the layer's norms on one rank."""
    model = p.model
    h, a = model.hidden_size, model.num_heads
    replicated: Any = model.norms_per_layer * model.norm_params + (h if model.attention_out_bias else 0)
    replicated += model.extra_layer_params
    if model.mla is None:
        k = model.head_dim
        kv = model.num_kv_heads / tp
        heads = 2 * a / tp + 2 * kv
        biases = (a / tp + 2 * kv) * k if model.qkv_bias else 0.0
        norms = {"none": 0.0, "head": 2.0 * k, "full": (a / tp + kv) * k}[model.qk_norm]
        return h * k * heads + biases + norms + replicated + (a / tp if model.attention_sinks else 0.0)
    mla = model.mla
    down = h * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim)
    query = (mla.q_lora_rank or h) * a * model.qk_head_size
    up = mla.kv_lora_rank * a * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (query + up + a * mla.v_head_dim * h) / tp + down + model.attention_vector_params + replicated


def dense_layer_params(p: Instance, tp: Any) -> Any:
    """A layer with a plain MLP, on one rank."""
    model = p.model
    bias = model.hidden_size if model.mlp_bias else 0
    return attention_params(p, tp) + (model.dense_mlp_params - bias) / tp + bias


def moe_layer_dense_params(p: Instance, tp: Any) -> Any:
    """What an MoE layer holds outside its routed experts, on one rank."""
    model = p.model
    gate = model.hidden_size if model.moe and model.moe.shared_gate and model.moe.shared_ffn_size else 0
    return attention_params(p, tp) + model.router_params + (model.shared_expert_params - gate) / tp + gate


def expert_layer_params(p: Instance, etp: Any, ep: Any) -> Any:
    """The routed experts of one MoE layer on one rank."""
    return p.model.routed_params_per_layer / (etp * ep)


def embedding_params(p: Instance, tp: Any) -> Any:
    """The embedding on a first-stage rank; AutoTP keeps an untied one whole."""
    model = p.model
    rest = model.embedding_params - model.vocab_size * model.embedding_width
    if p.auto_tp and not model.tied_embeddings:
        return model.embedding_params + 0.0 * tp
    return padded_vocab(p, tp) * model.embedding_width / tp + rest


def head_params(p: Instance, tp: Any) -> Any:
    """The output matrix and final norm on a last-stage rank."""
    model = p.model
    norm = model.norm_params if model.final_norm else 0
    rest = norm + model.projection_params
    return padded_vocab(p, tp) * (model.embedding_width + int(model.head_bias)) / tp + rest


def tied_head_params(p: Instance, tp: Any) -> Any:
    """What the last stage holds when it is also the first and the weights are tied: norm, bias and projection."""
    model = p.model
    norm = model.norm_params if model.final_norm else 0
    return padded_vocab(p, tp) * int(model.head_bias) / tp + norm + model.projection_params


def mtp_own_params(p: Instance, tp: Any) -> Any:
    """A multi-token-prediction module beside its layer, on one rank: the projection is divided, its norms are not."""
    return 2.0 * p.model.hidden_size**2 / tp + 3 * p.model.norm_params
