"""Tensor parallelism: heads and widths divide, and the group stays inside the fast domain."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance
from parsolve.specs.workload import MEGATRON_LIKE


@rule(
    "tp={tp} does not divide the {p.model.num_heads} attention heads",
    source="Megatron-Core transformer_config.py: num_attention_heads % tp == 0",
)
def attention_heads(p: Instance, *, tp: Any) -> Any:
    """Attention heads divide over tensor-parallel ranks; so tp is at most the number of heads."""
    return p.model.num_heads % tp == 0


@rule(
    "tp={tp} does not suit the {p.model.num_kv_heads} key/value heads: it must divide them"
    " (from Megatron-Core 0.16 on it may also be a multiple of them)",
    frameworks=(*MEGATRON_LIKE, "deepspeed", "torchtitan"),
    source="Megatron-Core transformer_config.py; attention.py",
)
def kv_heads(p: Instance, *, tp: Any) -> Any:
    """kv heads % tp == 0; Megatron-Core from 0.16 on also accepts tp % kv heads == 0 (replicated)."""
    if p.model.mla is not None:
        return tp > 0
    divides = p.model.num_kv_heads % tp == 0
    if p.megatron_core >= (0, 16):
        return divides | (tp % p.model.num_kv_heads == 0)
    return divides


@rule(
    "tp={tp} does not divide the MLP width ({p.model.ffn_size}, or the shared experts')",
    source="Megatron-Core tensor_parallel/layers.py: column and row sizes divide by tp",
)
def mlp_width(p: Instance, *, tp: Any) -> Any:
    """Widths of the dense MLP and of shared experts divide over tensor-parallel ranks."""
    model = p.model
    dense = (model.ffn_size % tp == 0) if model.num_dense_layers else tp > 0
    shared = model.moe.shared_ffn_size if model.moe else 0
    return dense & (shared % tp == 0)


@rule(
    "tp={tp} does not divide the hidden size {p.model.hidden_size}",
    source="Megatron-Core tensor_parallel/layers.py: row-parallel sizes divide by tp",
)
def hidden_width(p: Instance, *, tp: Any) -> Any:
    """The hidden size divides over tensor-parallel ranks."""
    return p.model.hidden_size % tp == 0


@rule(
    "tp={tp} leaves the fast domain of {p.domain} GPUs: it must divide {p.domain}",
    source="tensor-parallel traffic is in line with compute; across hosts it dominates (Narayanan et al. 2021)",
)
def tp_in_domain(p: Instance, *, tp: Any) -> Any:
    """Tensor-parallel groups align with the fast domain, unless the world is one domain."""
    return (p.domain % tp == 0) | (p.world <= p.domain)


@rule(
    "tp={tp} does not divide the {p.seq_len} tokens of a sequence over cp={cp}, as sequence parallelism needs",
    source="Megatron-Core sequence parallelism: s/cp divides by tp",
)
def sequence_shards(p: Instance, *, tp: Any, cp: Any) -> Any:
    """With sequence parallelism every tensor-parallel rank holds an equal share of the tokens."""
    if not p.sequence_parallel:
        return (tp > 0) & (cp > 0)
    return np.where(tp > 1, p.seq_len % (tp * cp) == 0, True)


@rule(
    "tp={tp} with experts needs sequence parallelism: drop --no-sequence-parallel or use tp=1",
    frameworks=MEGATRON_LIKE,
    source="Megatron-Core moe_layer.py: MoE training with tp > 1 and no sequence parallelism raises",
)
def moe_sequence_parallel(p: Instance, *, tp: Any) -> Any:
    """Megatron's MoE layers with tp > 1 only train with sequence parallelism."""
    return (tp == 1) | (p.model.moe is None) | p.sequence_parallel


RULES = (attention_heads, kv_heads, mlp_width, hidden_width, tp_in_domain, sequence_shards, moe_sequence_parallel)
