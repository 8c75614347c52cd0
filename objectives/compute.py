"""Compute of one layer, the embedding and the output layer for one microbatch: forward, backward and recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import term
from parsolve.objectives.parameters import kv_heads_per_rank, loss_vocab, padded_vocab
from parsolve.objectives.roofline import matmul_time, saturation, streaming_time
from parsolve.problem import Instance
from parsolve.specs import MLA, MoE, Recompute


def tokens(p: Instance, cp: Any, mbs: Any) -> Any:
    """Tokens that a rank's matrix products see per microbatch: mbs*s/cp."""
    return mbs * p.seq_len / cp


def token_share(p: Instance, tp: Any) -> Any:
    """Share of the tokens in token-wise operations: 1/tp with sequence parallelism, else 1."""
    return 1.0 / tp if p.sequence_parallel else np.ones_like(tp, dtype=float)


def repeats_attention(recompute: Any) -> Any:
    """1.0 where a layer's attention is computed again: selective or whole-layer recomputation.

    Under recompute=block a layer costs what it does without; what repeating some costs is objectives.layers'.
    """
    return ((recompute == Recompute.SELECTIVE) | (recompute == Recompute.FULL)) * 1.0


SELECTIVE_SHARE = 0.5
"""Share of a layer that selective recomputation repeats outside Megatron: every second operation (torchtitan's default)
or every second layer (fms-fsdp). Megatron's selective recomputes core attention only."""


def passes(p: Instance, recompute: Any) -> Any:
    """Forward-equivalents of a matrix product: forward 1 + backward 2 + 1 when whole layers are recomputed."""
    selective = SELECTIVE_SHARE if p.framework == "generic" else 0.0
    return 3.0 + (recompute == Recompute.FULL) + selective * (recompute == Recompute.SELECTIVE)


def lightly(recompute: Any) -> Any:
    """1 where the modules of light recomputation run again, else 0."""
    return (recompute == Recompute.LIGHT) * 1.0


def _latent_up_forward(p: Instance, mla: MLA, tp: Any, rows: Any) -> tuple[Any, Any]:
    """Latent attention's products up to the queries, and to the keys and values, of all heads."""
    model, a = p.model, p.model.num_heads
    query = matmul_time(p, rows, a / tp * model.qk_head_size, mla.q_lora_rank or model.hidden_size)
    return query, matmul_time(p, rows, a / tp * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)


def _attention_projections_forward(p: Instance, tp: Any, rows: Any) -> Any:
    model = p.model
    h, a = model.hidden_size, model.num_heads
    if model.mla is None:
        k = model.head_dim
        qkv = matmul_time(p, rows, (a / tp + 2 * kv_heads_per_rank(p, tp)) * k, h)
        return qkv + matmul_time(p, rows, h, a / tp * k)
    mla = model.mla
    shared_rows = rows * token_share(p, tp)
    down = matmul_time(p, shared_rows, mla.kv_lora_rank + mla.qk_rope_head_dim, h)
    if mla.q_lora_rank:
        down = down + matmul_time(p, shared_rows, mla.q_lora_rank, h)
    query, up = _latent_up_forward(p, mla, tp, rows)
    return down + query + up + matmul_time(p, rows, h, a / tp * mla.v_head_dim)


@term(label="compute", source="roofline, Williams et al. 2009")
def attention_projections(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Query, key, value and output projections of one layer and microbatch (forward + 2x backward), s.

    Light recomputation repeats latent attention's products up to the heads.
    """
    rows = tokens(p, cp, mbs)
    time = _attention_projections_forward(p, tp, rows) * passes(p, recompute)
    if p.model.mla is None:
        return time
    return time + lightly(recompute) * sum(_latent_up_forward(p, p.model.mla, tp, rows))


FLASH1_RATIO = 0.5
"""FlashAttention-1 relative to FlashAttention-2. Source: Dao 2023, figures 4 to 6: about twice as fast."""
ATTENTION_HALF_LENGTH = 512.0
"""Sequence length at which fused causal attention reaches half its rate. Source: Dao 2023, figure 5, 512 to 16k."""
SCORE_BYTES = {"fused_softmax": (9.0, 11.0), "unfused": (30.0, 34.0)}
"""Bytes streamed per score between the two products, forward and backward.

Fused softmax: softmax reads and writes 2, dropout reads and writes 2 and a mask of 1. Unfused: scale, mask, cast to
32 bits, softmax, cast back and dropout are kernels of their own. Counted per kernel.
"""


def _fused_attention(p: Instance, tp: Any, cp: Any, mbs: Any, again: Any) -> Any:
    model, profile = p.model, p.profile
    rows = tokens(p, cp, mbs)
    flops = 2.0 * rows * p.mean_attended * model.num_heads / tp * (model.qk_head_size + model.v_head_size)
    rate = p.half_peak * saturation(float(p.seq_len), ATTENTION_HALF_LENGTH)
    if p.attention_kernel == "flash1":
        rate *= FLASH1_RATIO
    forward = flops / (rate * profile.attention_efficiency)
    backward = 2.5 * flops / (rate * profile.attention_backward_efficiency)
    blocks = np.ones_like(cp, dtype=float) if p.framework == "deepspeed" else 1.0 * cp
    rescale = 8.0 * rows * model.num_heads / tp * model.v_head_size * (blocks - 1.0)
    merge = streaming_time(p, rescale, 0) + blocks * profile.kernel_overhead
    return forward * (1.0 + again) + backward + merge * (3.0 + again)


def _unfused_attention(p: Instance, tp: Any, cp: Any, mbs: Any, again: Any) -> Any:
    model = p.model
    rows, heads = p.seq_len / cp, mbs * model.num_heads / tp
    scores = heads * rows * p.seq_len
    products = matmul_time(p, rows, p.seq_len, model.qk_head_size, copies=heads, half=True)
    products = products + matmul_time(p, rows, model.v_head_size, p.seq_len, copies=heads, half=True)
    forward, backward = SCORE_BYTES[p.attention_kernel]
    softmax = streaming_time(p, forward * scores, 2) * (1.0 + again) + streaming_time(p, backward * scores, 2)
    return products * (3.0 + again) + softmax


@term(label="attention", source="Dao 2023 (FlashAttention-2): backward is 2.5x the forward's FLOPs")
def attention_core(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Scores and weighted values of one layer and microbatch, s; all but light recomputation repeats the forward.

    Fused: forward FLOPs 2*tokens*attended keys*heads/tp*(qk + v head size), a rate that grows with the sequence; a ring
    over cp ranks takes cp kernels, and each block after the first rescales the output in fp32.
    Not fused: two products over the full square of scores and a softmax that streams it through memory.
    """
    again = repeats_attention(recompute)
    compute = _fused_attention if p.flash_attention else _unfused_attention
    return compute(p, tp, cp, mbs, again)


FUSED_NORM_BYTES, UNFUSED_NORM_BYTES = 4.0, 36.0
"""Bytes per element that a norm moves forward: read and write once, or cast, square, mean, scale and cast apart."""


def norm_traffic(p: Instance) -> float:
    """Bytes per element that a norm moves forward."""
    return FUSED_NORM_BYTES if p.workload.fused_norm else UNFUSED_NORM_BYTES


@term(label="elementwise", source="bytes counted per tensor, 16 bits")
def attention_elementwise(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Norms, residual additions and rotary embedding of one layer and microbatch, s.

    Forward traffic: two norms (4 bytes x hidden each as one kernel, 36 unfused) and two residual additions (6 each) on
    the token-wise part, 4 bytes on every query and key element; backward twice that; times the profile's
    elementwise_traffic. Light recomputation repeats the norm before latent attention and its rotary embedding.
    """
    model = p.model
    rows = tokens(p, cp, mbs)
    norms = 2.0 * norm_traffic(p)
    rotary = 4.0 * (model.num_heads / tp + kv_heads_per_rank(p, tp)) * model.qk_head_size
    wise = (norms + 12.0 * p.profile.elementwise_traffic) * model.hidden_size * token_share(p, tp)
    rotary = rotary * (model.position == "rope") * p.profile.elementwise_traffic
    time = streaming_time(p, rows * (wise + rotary), 6) * passes(p, recompute)
    if model.mla is None:
        return time
    again = rows * (norm_traffic(p) * model.hidden_size * token_share(p, tp) + rotary)
    return time + lightly(recompute) * streaming_time(p, again, 2)


def _mlp_products(p: Instance, width: Any, rows: Any) -> Any:
    """Two (or three, gated) products of an MLP slice of ``width``."""
    h, columns = p.model.hidden_size, (2.0 if p.model.gated_mlp else 1.0)
    return matmul_time(p, rows, columns * width, h) + matmul_time(p, rows, h, width)


def _mlp_forward(p: Instance, width: Any, rows: Any) -> Any:
    """The products of an MLP slice of ``width`` and its activation."""
    columns = 2.0 if p.model.gated_mlp else 1.0
    activation = streaming_time(p, 2.0 * rows * width * (columns + 1.0) * p.profile.elementwise_traffic)
    return _mlp_products(p, width, rows) + activation


@term(label="compute", source="roofline, Williams et al. 2009")
def dense_mlp(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """The MLP of a dense layer for one microbatch, s."""
    return _mlp_forward(p, p.model.ffn_size / tp, tokens(p, cp, mbs)) * passes(p, recompute)


def _router_product(p: Instance, rows: Any) -> Any:
    return matmul_time(p, rows, p.model.moe.num_experts if p.model.moe else 1, p.model.hidden_size)


@term(label="compute", source="roofline, Williams et al. 2009")
def shared_experts(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Router and shared experts of an MoE layer for one microbatch, s (0 for a dense model).

    Light recomputation repeats the norm before them.
    """
    moe = p.model.moe
    if moe is None:
        return np.zeros(np.broadcast(tp, cp, mbs, recompute).shape)
    rows = tokens(p, cp, mbs)
    routed_rows = rows * token_share(p, tp)
    router = _router_product(p, routed_rows)
    router = router + streaming_time(p, 16.0 * routed_rows * moe.num_experts, 4)
    shared = _mlp_forward(p, moe.shared_ffn_size / tp, rows) if moe.shared_ffn_size else 0.0
    again = streaming_time(p, routed_rows * norm_traffic(p) * p.model.hidden_size)
    return (router + shared) * passes(p, recompute) + lightly(recompute) * again


@term(label="experts", source="grouped GEMM per rank; rows per expert from the even share times the imbalance")
def routed_experts(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Routed experts of one MoE layer and microbatch on the fullest rank, with permutation, s.

    A rank's experts see (tokens/tp)*K*etp rows in all, (E/ep) experts share them; the MoE dispatch always works on
    tokens/tp because tensor-parallel ranks hold different tokens (sequence parallelism) or split them. Light
    recomputation repeats the activation.
    """
    moe = p.model.moe
    if moe is None:
        return np.zeros(np.broadcast(tp, cp, ep, etp, mbs, recompute).shape)
    sent = tokens(p, cp, mbs) / tp * moe.top_k
    rows = sent * etp * p.profile.expert_imbalance
    width, columns = moe.ffn_size / etp, (2.0 if p.model.gated_mlp else 1.0)
    activation = streaming_time(p, 2.0 * rows * width * (columns + 1.0) * p.profile.elementwise_traffic)
    permute = streaming_time(p, 8.0 * p.model.hidden_size * (sent + rows), 6)
    whole = (_expert_products(p, moe, rows, ep, etp) + activation + permute) * passes(p, recompute)
    return whole + lightly(recompute) * activation


def _expert_products(p: Instance, moe: MoE, rows: Any, ep: Any, etp: Any) -> Any:
    """The products of a rank's experts, which share ``rows``."""
    h, width, columns = p.model.hidden_size, moe.ffn_size / etp, (2.0 if p.model.gated_mlp else 1.0)
    experts = np.maximum(1.0, moe.num_experts / ep)
    each = rows / experts
    products = matmul_time(p, each, columns * width, h, grouped=True, copies=experts)
    return products + matmul_time(p, each, h, width, grouped=True, copies=experts)


@term(label="head", source="logits product and cross-entropy")
def output_layer(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Final norm, logits and loss for one microbatch, never recomputed, s.

    The loss streams the logits: the profile's loss_traffic bytes an element, forward and backward. The product runs in
    16 bits whatever the layers use.
    """
    traffic = p.profile.loss_traffic * tokens(p, cp, mbs) * loss_vocab(p, tp)
    return 3.0 * _logits_product(p, tp, cp, mbs) + streaming_time(p, traffic, 6)


def _logits_product(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    return matmul_time(p, tokens(p, cp, mbs), padded_vocab(p, tp) / tp, p.model.embedding_width, half=True)


@term(label="embedding", source="table look-up and its scattered gradient")
def embedding_lookup(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Embedding of one microbatch, forward and backward, s: about 12 bytes x hidden a token."""
    return streaming_time(p, 12.0 * tokens(p, cp, mbs) * p.model.hidden_size * (1 + 0 * tp), 4)


WEIGHT_GRADIENTS = (
    "Qi et al. 2023: of a matrix product's backward pass the weight gradient is half, one forward's worth"
)


@term(label="compute", source=WEIGHT_GRADIENTS)
def attention_weight_gradients(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Of one layer's projections and microbatch, s; attention itself has no weights."""
    return _attention_projections_forward(p, tp, tokens(p, cp, mbs))


@term(label="compute", source=WEIGHT_GRADIENTS)
def dense_weight_gradients(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Of a dense layer's MLP and one microbatch, s."""
    return _mlp_products(p, p.model.ffn_size / tp, tokens(p, cp, mbs))


@term(label="experts", source=WEIGHT_GRADIENTS)
def expert_weight_gradients(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any) -> Any:
    """Of an MoE layer's router, shared and routed experts and one microbatch, s (0 for a dense model)."""
    moe = p.model.moe
    if moe is None:
        return np.zeros(np.broadcast(tp, cp, ep, etp, mbs).shape)
    rows = tokens(p, cp, mbs)
    routed = rows / tp * moe.top_k * etp * p.profile.expert_imbalance
    products = _router_product(p, rows * token_share(p, tp)) + _expert_products(p, moe, routed, ep, etp)
    return products + (_mlp_products(p, moe.shared_ffn_size / tp, rows) if moe.shared_ffn_size else 0.0)


@term(label="head", source=WEIGHT_GRADIENTS)
def head_weight_gradients(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Of the output layer and one microbatch, s; the loss has no weights."""
    return _logits_product(p, tp, cp, mbs)
