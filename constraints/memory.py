"""Memory of the worst stage: states, activations in flight, logits, and what lies outside the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parsolve.functions import Count, Limit, Part, StageMax, Term, term
from parsolve.objectives import counts, parameters
from parsolve.objectives.compute import SELECTIVE_SHARE, lightly, repeats_attention, token_share, tokens
from parsolve.objectives.multi_token import kept_bytes
from parsolve.objectives.optimizer_step import sharing
from parsolve.objectives.shard_groups import expert_group_size, group_size, second_copy
from parsolve.problem import Instance
from parsolve.specs import Recompute
from parsolve.specs.workload import MEGATRON_LIKE

WEIGHT_BYTES = 2.0
FUSED_NORM_BYTES, UNFUSED_NORM_BYTES = 4.0, 10.0
"""Kept per element by a norm: its input and output; where it is not one kernel also a 32-bit copy and the normalised
input."""
GATHERED_LOGITS_BYTES = 16.0
"""Bytes per logit where every rank holds the whole vocabulary: gathered in 16 bits, a 32-bit copy, its log-softmax and
gradient, and the gradient in 16 bits (torch's cross_entropy)."""
SCORE_BYTES = {"fused_softmax": 5.0, "unfused": 6.0}
"""Kept per score: softmax, dropout mask and its output; without a fused kernel the softmax in 32 and in 16 bits."""
TRANSIENT_SCORE_BYTES = {"fused_softmax": 8.0, "unfused": 16.0}
"""Gradients and copies of the scores of one layer while its backward pass runs."""
FP8_WEIGHT_BYTES = 2.0
"""Transformer Engine keeps a cast and a transposed cast of every matrix beside the 16-bit weights; others cast anew."""


def _second_copy_bytes(p: Instance, zero: Any, shards: Any) -> Any:
    """The share of 16-bit weights that a rank keeps for its group beside its own, bytes per parameter (ZeRO++ hpZ)."""
    if not second_copy(p):
        return 0.0
    held = (zero >= 3) & (np.asarray(shards) > p.workload.shard_group)
    return np.where(held, WEIGHT_BYTES / float(p.workload.shard_group or 1), 0.0)


def _bytes_per_parameter(p: Instance, zero: Any, group: Any) -> tuple[Any, Any, Any]:
    """Weights, gradients, optimizer states on one rank of ``group`` that share them, bytes per parameter held.

    Megatron bf16: 2 + 4 + 12 = 18, with the distributed optimizer 6 + 12/group; 16-bit gradients: 2 + 2 + 12.
    ZeRO-1 shards the optimizer, 2 also gradients, 3 also weights. Source: Rajbhandari et al. 2020.
    """
    one = np.ones_like(group, dtype=float)
    cached = p.workload.precision == "fp8" and p.framework in MEGATRON_LIKE
    weights = WEIGHT_BYTES + (FP8_WEIGHT_BYTES if cached else 0.0)
    return (
        weights / np.where(zero >= 3, group, one) + _second_copy_bytes(p, zero, group),
        p.gradient_bytes / np.where(zero >= 2, group, one),
        p.optimizer_bytes / np.where(zero >= 1, sharing(p, group, zero), one),
    )


def _dense_states(name: str, params: Callable[[Instance, Any], Any], what: str) -> tuple[Term, Term, Term]:
    def make(index: int, label: str) -> Term:
        def states(p: Instance, *, tp: Any, shards: Any, zero: Any) -> Any:
            return params(p, tp) * _bytes_per_parameter(p, zero, group_size(p, shards, zero))[index]

        states.__doc__ = f"{label.capitalize()} of {what} on one rank, sharded over dp*cp by the ZeRO stage, bytes."
        return term(unit="B", label=label, source="Rajbhandari et al. 2020 (ZeRO)", name=f"{name}_{label}")(states)

    return make(0, "parameters"), make(1, "gradients"), make(2, "optimizer")


def _expert_states(index: int, label: str, grouped: bool = False) -> Term:
    def in_groups(p: Instance, *, tp: Any, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
        group = expert_group_size(p, tp, ep, etp, edp, zero)
        return parameters.expert_layer_params(p, etp, ep) * _bytes_per_parameter(p, zero, group)[index]

    def states(p: Instance, *, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
        return parameters.expert_layer_params(p, etp, ep) * _bytes_per_parameter(p, zero, edp)[index]

    what = f"{label.capitalize()} of one layer's routed experts on one rank, sharded over"
    states.__doc__, in_groups.__doc__ = f"{what} edp, bytes.", f"{what} a shard group, bytes."
    name, function = (f"grouped_expert_{label}", in_groups) if grouped else (f"expert_{label}", states)
    return term(unit="B", label=label, source="Rajbhandari et al. 2020 (ZeRO)", name=name)(function)


DENSE_LAYER_STATES = _dense_states("dense_layer", parameters.dense_layer_params, "one dense layer")
MOE_LAYER_STATES = _dense_states(
    "moe_layer", parameters.moe_layer_dense_params, "one MoE layer without its routed experts"
)
EXPERT_STATES = (
    _expert_states(0, "parameters"),
    _expert_states(1, "gradients"),
    _expert_states(2, "optimizer"),
)
GROUPED_EXPERT_STATES = (
    _expert_states(0, "parameters", grouped=True),
    _expert_states(1, "gradients", grouped=True),
    _expert_states(2, "optimizer", grouped=True),
)
EMBEDDING_STATES = _dense_states("embedding", parameters.embedding_params, "the embedding")
HEAD_STATES = _dense_states("head", parameters.head_params, "the output layer")
MTP_STATES = _dense_states("mtp", parameters.mtp_own_params, "a prediction module beside its layer")
TIED_HEAD_STATES = _dense_states("tied_head", parameters.tied_head_params, "the final norm beside a tied embedding")


def _attention_bytes(p: Instance, tp: Any) -> Any:
    """Saved by attention and its norm per token, 2-byte elements: norm input and output, q, k, v, output.

    With h = a*k this is Korthikanti et al. 2022's 11*s*b*h part (8 token-divided, 3 more with dropout). A norm that is
    not one kernel keeps two 32-bit copies as well.
    """
    model = p.model
    a, shared = model.num_heads / tp, token_share(p, tp)
    norm = FUSED_NORM_BYTES if p.workload.fused_norm else UNFUSED_NORM_BYTES
    saved = norm * model.hidden_size * shared + 2.0 * a * model.v_head_size
    if model.mla is None:
        saved = saved + 2.0 * model.head_dim * (a + 2.0 * parameters.kv_heads_per_rank(p, tp))
    else:
        latent = (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        saved = saved + 2.0 * a * (2.0 * model.qk_head_size + model.v_head_size) + 4.0 * latent * shared
    return saved


def _score_bytes(p: Instance, tp: Any, cp: Any) -> Any:
    """What is kept of the scores, bytes a token: fused attention its row sums; else softmax, mask and dropout.

    5*a*s/tp bytes with a fused softmax (Korthikanti et al. 2022).
    """
    return (4.0 + SCORE_BYTES.get(p.attention_kernel, 0.0) * p.seq_len) * p.model.num_heads / tp + 0.0 * cp


def _transient_scores(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """Copies of one layer's scores that live only during its backward pass, bytes (0 for fused attention)."""
    scores = tokens(p, cp, mbs) * p.seq_len * p.model.num_heads / tp
    return TRANSIENT_SCORE_BYTES.get(p.attention_kernel, 0.0) * scores


def _mlp_bytes(p: Instance, width: Any, shared: Any) -> Any:
    """Saved by an MLP of ``width`` and its norm per token: norm input and output, products, activation."""
    columns = 2.0 if p.model.gated_mlp else 1.0
    norm = FUSED_NORM_BYTES if p.workload.fused_norm else UNFUSED_NORM_BYTES
    return norm * p.model.hidden_size * shared + 2.0 * width * (columns + 1.0)


def _checkpoint(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """The input of a layer, kept when the layer is recomputed: 2 bytes x hidden a token."""
    return 2.0 * tokens(p, cp, mbs) * p.model.hidden_size * token_share(p, tp)


def _attention_rebuilt(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """What light recomputation discards of latent attention, bytes: its norm's output, and q, k, v of all heads.

    Norms that are one kernel with the product behind them, as before other attention, keep theirs.
    Source: Megatron-Core gpt_layer_specs.py, transformer_layer.py, multi_latent_attention.py.
    """
    model = p.model
    if model.mla is None:
        return np.zeros(np.broadcast(tp, cp, mbs).shape)
    heads = 2.0 * model.num_heads / tp * (2.0 * model.qk_head_size + model.v_head_size)
    return tokens(p, cp, mbs) * (2.0 * model.hidden_size * token_share(p, tp) + heads)


def _experts_rebuilt(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """What light recomputation discards of an MoE layer, bytes: its norm's output and the experts' activations.

    Source: Megatron-Core transformer_layer.py, moe/experts.py.
    """
    moe = p.model.moe
    if moe is None:
        return np.zeros(np.broadcast(tp, cp, mbs).shape)
    rows = tokens(p, cp, mbs)
    activations = rows / tp * moe.top_k * p.profile.expert_imbalance * 2.0 * moe.ffn_size
    return rows * 2.0 * p.model.hidden_size * token_share(p, tp) + activations


def _attention_saved(p: Instance, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    scores = np.where(repeats_attention(recompute), 0.0, _score_bytes(p, tp, cp))
    saved = tokens(p, cp, mbs) * (_attention_bytes(p, tp) + scores)
    return saved - lightly(recompute) * _attention_rebuilt(p, tp, cp, mbs)


def _dense_mlp_saved(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    return tokens(p, cp, mbs) * _mlp_bytes(p, p.model.ffn_size / tp, token_share(p, tp))


def _experts_saved(p: Instance, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Router, dispatched copies, expert products and outputs on the fullest rank, plus shared experts."""
    moe, model = p.model.moe, p.model
    if moe is None:
        return np.zeros(np.broadcast(tp, cp, etp, mbs, recompute).shape)
    rows = tokens(p, cp, mbs)
    copies = rows / tp * moe.top_k * p.profile.expert_imbalance
    columns = 2.0 if model.gated_mlp else 1.0
    routed = copies * (4.0 * model.hidden_size * etp + 2.0 * moe.ffn_size * (columns + 1.0))
    router = rows * token_share(p, tp) * (4.0 * model.hidden_size + 8.0 * moe.num_experts)
    shared = rows * 2.0 * moe.shared_ffn_size / tp * (columns + 1.0)
    return routed + router + shared - lightly(recompute) * _experts_rebuilt(p, tp, cp, mbs)


def _kept(p: Instance, recompute: Any, full: Any, checkpoint: Any) -> Any:
    """What remains for the backward pass: the input of recomputed layers; outside Megatron selective keeps half.

    recompute=block: the input of every layer here; what the others keep more is ``dense_layer_kept`` and
    ``moe_layer_kept``.
    """
    kept = np.where((recompute == Recompute.FULL) | (recompute == Recompute.BLOCK), checkpoint, full)
    if p.framework != "generic":
        return kept
    partly = (1.0 - SELECTIVE_SHARE) * full + SELECTIVE_SHARE * checkpoint
    return np.where(recompute == Recompute.SELECTIVE, partly, kept)


def _dense_full(p: Instance, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """All that a dense layer saves or, rebuilt, holds for one microbatch, bytes."""
    saved = _attention_saved(p, tp, cp, mbs, recompute) + _dense_mlp_saved(p, tp, cp, mbs)
    return p.profile.activation_memory * saved


def _moe_full(p: Instance, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """All that an MoE layer saves or, rebuilt, holds for one microbatch, bytes."""
    saved = _attention_saved(p, tp, cp, mbs, recompute) + _experts_saved(p, tp, cp, etp, mbs, recompute)
    return p.profile.activation_memory * saved


KORTHIKANTI = "Korthikanti et al. 2022, section 4, counted per tensor"
NONE, FULL = np.asarray(int(Recompute.NONE)), np.asarray(int(Recompute.FULL))


@term(unit="B", label="activations", source=KORTHIKANTI)
def dense_layer_activations(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Kept for the backward pass of one dense layer and microbatch, bytes; whole-layer recomputation: its input."""
    return _kept(p, recompute, _dense_full(p, tp, cp, mbs, recompute), _checkpoint(p, tp, cp, mbs))


@term(unit="B", label="activations", source=KORTHIKANTI)
def moe_layer_activations(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Kept for the backward pass of one MoE layer and microbatch, bytes; whole-layer recomputation: its input."""
    return _kept(p, recompute, _moe_full(p, tp, cp, etp, mbs, recompute), _checkpoint(p, tp, cp, mbs))


@term(unit="B", label="activations", source=KORTHIKANTI)
def dense_layer_kept(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """What a dense layer that is not recomputed keeps beyond its input for one microbatch, bytes (recompute=block)."""
    return np.maximum(0.0, _dense_full(p, tp, cp, mbs, NONE) - _checkpoint(p, tp, cp, mbs))


@term(unit="B", label="activations", source=KORTHIKANTI)
def moe_layer_kept(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any) -> Any:
    """What an MoE layer that is not recomputed keeps beyond its input for one microbatch, bytes (recompute=block)."""
    return np.maximum(0.0, _moe_full(p, tp, cp, etp, mbs, NONE) - _checkpoint(p, tp, cp, mbs))


@term(unit="B", label="activations", source=KORTHIKANTI)
def dense_layer_rebuilt(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """One dense layer rebuilt at a time where a chunk recomputes all its layers, bytes (recompute=block)."""
    return _dense_full(p, tp, cp, mbs, FULL)


@term(unit="B", label="activations", source=KORTHIKANTI)
def moe_layer_rebuilt(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any) -> Any:
    """One MoE layer rebuilt at a time where a chunk recomputes all its layers, bytes (recompute=block)."""
    return _moe_full(p, tp, cp, etp, mbs, FULL)


@term(unit="B", label="activations", source=KORTHIKANTI)
def dense_working_set(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """One dense layer rebuilt at a time when layers are recomputed, and the copies of the scores in use, bytes.

    Of light recomputation what it rebuilds of one layer.
    """
    rebuilt = lightly(recompute) * p.profile.activation_memory * _attention_rebuilt(p, tp, cp, mbs)
    rebuilt = np.where(recompute == Recompute.FULL, _dense_full(p, tp, cp, mbs, recompute), rebuilt)
    return rebuilt + _transient_scores(p, tp, cp, mbs)


@term(unit="B", label="activations", source=KORTHIKANTI)
def moe_working_set(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """One MoE layer rebuilt at a time when layers are recomputed, and the copies of the scores in use, bytes.

    Of light recomputation what it rebuilds of one layer.
    """
    rebuilt = _attention_rebuilt(p, tp, cp, mbs) + _experts_rebuilt(p, tp, cp, mbs)
    rebuilt = lightly(recompute) * p.profile.activation_memory * rebuilt
    rebuilt = np.where(recompute == Recompute.FULL, _moe_full(p, tp, cp, etp, mbs, recompute), rebuilt)
    return rebuilt + _transient_scores(p, tp, cp, mbs)


RETAINED = (
    "PyTorch pipelining/_backward.py: stage_backward_input retains the graph, and the gradients of what weights make"
)


def _attention_gradients(p: Instance, tp: Any) -> Any:
    """Gradients of what the weights of attention and its norm put out, bytes a token: 2 an element."""
    model = p.model
    a, shared = model.num_heads / tp, token_share(p, tp)
    norm_and_output = 2.0 * model.hidden_size * (shared + 1.0)
    if model.mla is None:
        return norm_and_output + 2.0 * model.head_dim * (a + 2.0 * parameters.kv_heads_per_rank(p, tp))
    latent = (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    heads = model.qk_head_size + model.mla.qk_nope_head_dim + model.mla.v_head_dim
    return norm_and_output + 2.0 * a * heads + 4.0 * latent * shared


@term(unit="B", label="activations", source=RETAINED)
def dense_layer_waiting(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Kept of one dense layer and microbatch between its input and its weight gradients, beside its activations, bytes.

    The output gradients of its norms and matrix products, and what was recomputed. Measured with PyTorch 2.13: 15 times
    the hidden size a token for a gated MLP of four times that and no grouped heads, and all activations.
    """
    columns = 2.0 if p.model.gated_mlp else 1.0
    norm_and_output = 2.0 * p.model.hidden_size * (token_share(p, tp) + 1.0)
    gradients = _attention_gradients(p, tp) + norm_and_output + 2.0 * columns * p.model.ffn_size / tp
    saved = dense_layer_activations.compute
    whole = saved(p, tp=tp, cp=cp, mbs=mbs, recompute=Recompute.NONE)
    return tokens(p, cp, mbs) * gradients + whole - saved(p, tp=tp, cp=cp, mbs=mbs, recompute=recompute)


@term(unit="B", label="activations", source=RETAINED)
def moe_layer_waiting(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Kept of one MoE layer and microbatch between input and weight gradients, beside its activations, bytes."""
    moe, model = p.model.moe, p.model
    if moe is None:
        return np.zeros(np.broadcast(tp, cp, etp, mbs, recompute).shape)
    columns, rows = (2.0 if model.gated_mlp else 1.0), tokens(p, cp, mbs)
    copies = rows / tp * moe.top_k * p.profile.expert_imbalance
    routed = copies * (2.0 * model.hidden_size * etp + 2.0 * columns * moe.ffn_size)
    norm_and_router = token_share(p, tp) * (2.0 * model.hidden_size + 4.0 * moe.num_experts)
    shared = 2.0 * (columns * moe.shared_ffn_size / tp + model.hidden_size * (moe.shared_ffn_size > 0))
    gradients = rows * (_attention_gradients(p, tp) + norm_and_router + shared) + routed
    saved = moe_layer_activations.compute
    whole = saved(p, tp=tp, cp=cp, etp=etp, mbs=mbs, recompute=Recompute.NONE)
    return gradients + whole - saved(p, tp=tp, cp=cp, etp=etp, mbs=mbs, recompute=recompute)


@term(unit="B", label="logits", source=RETAINED)
def logit_gradients(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Gradient of the logits of one microbatch that waits for the output layer's weight gradient, bytes: 2 a logit."""
    return 2.0 * tokens(p, cp, mbs) * parameters.loss_vocab(p, tp)


@term(unit="B", label="activations", source=KORTHIKANTI)
def embedding_activations(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """The embedding's output of one microbatch, bytes."""
    return _checkpoint(p, tp, cp, mbs)


@term(unit="B", label="logits", source="vocabulary-parallel cross-entropy: 16-bit logits, fp32 copy and gradient")
def logits(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Logits of one microbatch on the last stage: tokens*V/tp times the profile's logits_memory bytes.

    All of V, at 16 bytes, where the loss gathers them.
    """
    held = p.profile.logits_memory if p.parallel_loss else GATHERED_LOGITS_BYTES
    return tokens(p, cp, mbs) * parameters.loss_vocab(p, tp) * held


def _mtp_layer_saved(p: Instance, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """What the layer of a prediction module keeps when it is not recomputed as a whole, bytes."""
    moe = p.model.layer_is_moe[-1]
    width = _experts_saved(p, tp, cp, etp, mbs, recompute) if moe else _dense_mlp_saved(p, tp, cp, mbs)
    return p.profile.activation_memory * (_attention_saved(p, tp, cp, mbs, recompute) + width)


MTP_SOURCE = "Megatron-Core multi_token_prediction.py, counted per tensor"


@term(unit="B", label="activations", source=MTP_SOURCE)
def mtp_activations(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Kept for the backward pass of one prediction module and microbatch, its layer included, bytes.

    Whole-layer recomputation keeps the module's two inputs and its final norm; recompute=block leaves modules alone
    (multi_token_prediction.py: "not supported for MTP yet").
    """
    norm = FUSED_NORM_BYTES if p.workload.fused_norm else UNFUSED_NORM_BYTES
    again = np.where(recompute == Recompute.BLOCK, Recompute.NONE, recompute)
    layer = _kept(p, again, _mtp_layer_saved(p, tp, cp, etp, mbs, recompute), 0.0)
    return layer + kept_bytes(p, tp, cp, mbs, recompute, norm)


@term(unit="B", label="activations", source=MTP_SOURCE)
def mtp_rebuilt(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """What a prediction module needs while it is rebuilt, bytes."""
    layer = _mtp_layer_saved(p, tp, cp, etp, mbs, recompute)
    return np.where(recompute == Recompute.FULL, layer, 0.0) + _transient_scores(p, tp, cp, mbs)


@term(unit="B", label="activations", source=MTP_SOURCE)
def mtp_working_set(p: Instance, *, tp: Any, cp: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """What a prediction module that is rebuilt needs beyond the logits, which are gone by then, bytes."""
    whole = mtp_rebuilt.compute(p, tp=tp, cp=cp, etp=etp, mbs=mbs, recompute=recompute)
    return np.maximum(0.0, whole - (1 + p.mtp_layers) * logits.compute(p, tp=tp, cp=cp, mbs=mbs))


@term(unit="B", label="gathered", source="FSDP keeps the layer in use and the next one gathered")
def gathered_dense_layers(p: Instance, *, tp: Any, zero: Any) -> Any:
    """Two gathered dense layers under ZeRO-3, bytes."""
    return np.where(zero >= 3, 2.0 * WEIGHT_BYTES * parameters.dense_layer_params(p, tp), 0.0)


@term(unit="B", label="gathered", source="FSDP keeps the layer in use and the next one gathered")
def gathered_moe_layers(p: Instance, *, tp: Any, ep: Any, etp: Any, zero: Any) -> Any:
    """Two gathered MoE layers under ZeRO-3, bytes."""
    layer = parameters.moe_layer_dense_params(p, tp) + parameters.expert_layer_params(p, etp, ep)
    return np.where(zero >= 3, 2.0 * WEIGHT_BYTES * layer, 0.0)


@term(unit="B", label="outside", source="profile: outside_bytes")
def outside_tensors(p: Instance) -> Any:
    """CUDA context, NCCL buffers, workspaces, bytes."""
    return float(p.profile.outside_bytes)


@term(unit="1", source="profile: fragmentation")
def fragmentation(p: Instance) -> Any:
    """The allocator's loss as a share of the activations."""
    return p.profile.fragmentation


def stage_memory(p: Instance) -> StageMax:
    """All bytes of a rank on its pipeline stage; the worst stage decides."""
    states: list[tuple[tuple[Term, ...], Count]] = [
        (EMBEDDING_STATES, counts.is_first),
        (HEAD_STATES, counts.has_own_head),
        (TIED_HEAD_STATES, counts.has_shared_head),
    ]
    activations: list[tuple[Term, Count]] = [(embedding_activations, counts.embeddings_in_flight)]
    gathered: list[tuple[Term, Count]] = []
    experts = EXPERT_STATES if p.workload.shard_group is None else GROUPED_EXPERT_STATES
    split = p.workload.splits_backward
    if split:
        activations.append((logit_gradients, counts.heads_waiting))
    if p.model.num_dense_layers:
        states.append((DENSE_LAYER_STATES, counts.dense_layers))
        activations.append((dense_layer_activations, counts.dense_layers_in_flight))
        activations.append((dense_working_set, counts.holds_dense))
        if p.splits.with_recomputation:
            activations.append((dense_layer_kept, counts.dense_kept_in_flight))
            activations.append((dense_layer_rebuilt, counts.rebuilds_dense))
        gathered.append((gathered_dense_layers, counts.holds_dense))
        if split:
            activations.append((dense_layer_waiting, counts.dense_layers_waiting))
    if p.model.num_moe_layers:
        states += [(MOE_LAYER_STATES, counts.moe_layers), (experts, counts.moe_layers)]
        activations.append((moe_layer_activations, counts.moe_layers_in_flight))
        activations.append((moe_working_set, counts.holds_moe))
        if p.splits.with_recomputation:
            activations.append((moe_layer_kept, counts.moe_kept_in_flight))
            activations.append((moe_layer_rebuilt, counts.rebuilds_moe))
        gathered.append((gathered_moe_layers, counts.holds_moe))
    gpipe = p.workload.schedule == "gpipe"
    outputs = [counts.gpipe_outputs_in_flight if gpipe else counts.is_last]
    modules = counts.gpipe_mtp_modules_in_flight if gpipe else counts.mtp_modules_in_flight
    if p.mtp_layers:
        layer = (*MOE_LAYER_STATES, *experts) if p.model.layer_is_moe[-1] else DENSE_LAYER_STATES
        states += [((*layer, *MTP_STATES), counts.mtp_modules), (EMBEDDING_STATES, counts.mtp_embedding)]
        outputs.append(counts.gpipe_mtp_modules_in_flight if gpipe else counts.mtp_outputs)
        activations += [(mtp_activations, modules), (mtp_working_set, counts.mtp_beside)]
        activations.append((mtp_rebuilt, counts.mtp_apart))
        if split:
            activations.append((moe_layer_waiting, counts.moe_layers_waiting))
    parts = [Part(t, here) for terms, here in states for t in terms]
    parts += [Part(t, here) for t, here in activations]
    parts += [Part(logits, here) for here in outputs]
    parts += [Part(t, here, fragmentation, label="fragmentation") for t, here in activations]
    parts += [Part(logits, here, fragmentation, label="fragmentation") for here in outputs]
    parts += [Part(t, here) for t, here in gathered]
    parts.append(Part(outside_tensors))
    return StageMax("memory", tuple(parts))


memory = Limit(
    name="memory",
    quantity=stage_memory,
    budget=lambda p: p.usable_bytes,
    message="the worst stage needs {value:.2f} GiB, {excess:.2f} GiB more than the usable {budget:.2f} GiB",
    doc=stage_memory.__doc__ or "",
    source="driver-visible bytes less --memory-reserve",
)

LIMITS = (memory,)
