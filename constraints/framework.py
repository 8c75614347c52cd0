"""What a launcher has no words for: model features, precisions and optimizers that restrict the plans it is offered."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance, Problem
from parsolve.specs import Model, Recompute
from parsolve.specs.workload import MEGATRON_LIKE

GROUPED_PRODUCTS_SINCE = 8.0
"""Compute capability from which Megatron-LM multiplies the experts of a rank together. Source: arguments.py."""


def first_reason(reasons: list[tuple[bool, str]]) -> str | None:
    """The text beside the first true flag."""
    return next((what for holds, what in reasons if holds), None)


def megatron_lm_gap(model: Model) -> str | None:
    """The first feature of the model that Megatron-LM's pretrain_gpt.py cannot build, None when it can.

    Source: megatron/training/arguments.py; megatron/core/transformer.
    """
    return first_reason(
        [
            (model.position == "alibi", "ALiBi positions"),
            (model.norms_per_layer == 1, "parallel attention and MLP blocks (one norm a layer)"),
            (model.norms_per_layer > 2, f"layers of {model.norms_per_layer} norms"),
            (model.embedding_norm, "a norm after the embedding"),
            (model.embedding_size is not None, "an embedding of another width than its layers"),
            (model.extra_layer_params > 0, "further small parameters in its layers (extra_layer_params)"),
            (model.gated_mlp and model.activation in ("relu", "relu2"), f"a gated MLP with {model.activation}"),
        ]
    )


def megatron_deepspeed_gap(problem: Problem) -> str | None:
    """The first feature of the model that Megatron-DeepSpeed cannot build, None when it can.

    Source: deepspeedai/Megatron-DeepSpeed, megatron/arguments.py, megatron/model.
    """
    model, moe = problem.model, problem.model.moe
    reasons = [
        (model.mla is not None, "multi-head latent attention"),
        (model.position == "alibi", "ALiBi positions"),
        (model.window is not None and model.window < problem.workload.seq_len, "sliding windows"),
        (model.attention_sinks, "attention sinks"),
        (model.qk_norm != "none", "norms of queries and keys"),
        (model.norms_per_layer == 1, "parallel attention and MLP blocks (one norm a layer)"),
        (model.norms_per_layer > 2, f"layers of {model.norms_per_layer} norms"),
        (model.embedding_norm, "a norm after the embedding"),
        (model.embedding_size is not None, "an embedding of another width than its layers"),
        (model.extra_layer_params > 0, "further small parameters in its layers (extra_layer_params)"),
        (model.gated_mlp and model.activation != "silu", f"a gated MLP with {model.activation}"),
    ]
    if moe:
        reasons += [
            (bool(moe.shared_ffn_size), "shared experts"),
            (bool(moe.dense_layers), "an MLP of another width in some layers of a mixture of experts"),
            (moe.router_score != "softmax", f"{moe.router_score} routing"),
            (moe.num_groups is not None, "node-limited routing"),
        ]
    return first_reason(reasons)


def auto_tp_gap(model: Model) -> str | None:
    """The first feature that keeps DeepSpeed's AutoTP from dividing a Hugging Face model, None when it can.

    AutoTP follows transformers' ``base_model_tp_plan``, which the dense decoders with rotary positions have.
    Source: DeepSpeed runtime/engine.py, module_inject/tp_plan_converter.py; transformers models/*/configuration_*.py.
    """
    return first_reason(
        [
            (model.moe is not None, "experts"),
            (model.mla is not None, "latent attention"),
            (model.position != "rope", "positions other than rotary ones"),
            (model.embedding_norm, "a norm after the embedding"),
        ]
    )


def auto_tp(problem: Problem) -> bool:
    """DeepSpeed divides the model by AutoTP: Megatron-DeepSpeed cannot build it, and its plan in transformers can."""
    here = problem.workload.framework == "deepspeed" and megatron_deepspeed_gap(problem) is not None
    return here and auto_tp_gap(problem.model) is None


@rule(
    "{p.model.name} has layers that Megatron-DeepSpeed cannot build, so DeepSpeed trains it with ZeRO, and AutoTP where"
    " it can: tp={tp} (AutoTP: {p.auto_tp}), cp={cp}, pp={pp}, ep={ep}; the others must be 1",
    frameworks=("deepspeed",),
    source="Megatron-DeepSpeed, megatron/model; plain DeepSpeed shards any Hugging Face model",
)
def zero_alone(p: Instance, *, tp: Any, cp: Any, pp: Any, ep: Any) -> Any:
    """A model that only plain DeepSpeed can build is trained with ZeRO, and AutoTP where its plan is known."""
    alone = (np.asarray(cp) == 1) & (pp == 1) & (ep == 1) & ((np.asarray(tp) == 1) | p.auto_tp)
    return alone | (megatron_deepspeed_gap(p.problem) is None)


@rule(
    "zero={zero} with AutoTP over tp={tp}: use zero <= 2, and no sequence parallelism",
    frameworks=("deepspeed",),
    source="DeepSpeed runtime/tensor_parallel: stages 0 to 2; layers.py all-reduces whole activations",
)
def auto_tp_stages(p: Instance, *, tp: Any, zero: Any) -> Any:
    """AutoTP goes with ZeRO 0 to 2 and keeps activations whole."""
    fine = (np.asarray(zero) <= 2) & (not p.sequence_parallel)
    return (np.asarray(tp) == 1) | fine | (not p.auto_tp)


@rule(
    "recompute={recompute} with a Hugging Face trainer (tp={tp}, cp={cp}, pp={pp}, ep={ep}): use none or full",
    frameworks=("deepspeed",),
    source="Hugging Face trainers recompute whole layers or nothing",
)
def whole_layers(p: Instance, *, tp: Any, cp: Any, pp: Any, ep: Any, recompute: Any) -> Any:
    """Plain DeepSpeed on a Hugging Face model has no selective recomputation."""
    alone = ((np.asarray(tp) == 1) | p.auto_tp) & (cp == 1) & (pp == 1) & (ep == 1)
    return ~alone | (np.asarray(recompute) != Recompute.SELECTIVE)


@rule(
    "DeepSpeed's own configuration has no {p.workload.precision} training: use bf16",
    frameworks=("deepspeed",),
    source="DeepSpeed runtime/config.py: bf16 and fp16 sections",
)
def deepspeed_precision(p: Instance) -> Any:
    """DeepSpeed trains in bf16 or fp16."""
    return np.bool_(p.workload.precision != "fp8")


@rule(
    "zero={zero}: Megatron-LM's distributed optimizer has no {p.workload.optimizer}; use zero=0 or adam",
    frameworks=MEGATRON_LIKE,
    source="megatron/core/optimizer/distrib_optimizer.py: Adam only",
)
def sharded_optimizer(p: Instance, *, zero: Any) -> Any:
    """Megatron-LM shards the states of Adam only."""
    return (np.asarray(zero) == 0) | (p.workload.optimizer == "adam")


@rule(
    "cp={cp} needs fused attention, which {p.cluster.gpu.name} lacks: use cp=1",
    frameworks=MEGATRON_LIKE,
    source="Transformer Engine: context parallelism is part of its fused attention (compute capability 8.0)",
)
def context_needs_fused_attention(p: Instance, *, cp: Any) -> Any:
    """Context parallelism in Megatron-LM needs an Ampere GPU or newer."""
    return (np.asarray(cp) == 1) | (p.cluster.gpu.compute_capability >= 8)


@rule(
    "cp={cp} with attention sinks exchanges whole heads: it must divide the heads of a tp={tp} rank",
    frameworks=MEGATRON_LIKE,
    source="Transformer Engine: sinks with context parallelism only all-to-all",
)
def sinks_exchange_heads(p: Instance, *, cp: Any, tp: Any) -> Any:
    """With attention sinks context parallelism is all-to-all over heads."""
    heads = p.model.num_heads // np.maximum(tp, 1)
    kv_heads = np.maximum(1, p.model.num_kv_heads // np.maximum(tp, 1))
    return (np.asarray(cp) == 1) | (not p.model.attention_sinks) | ((heads % cp == 0) & (kv_heads % cp == 0))


@rule(
    "recompute={recompute} is Megatron-Core's, for latent attention, and for experts on Ampere or newer; "
    "{p.framework} with {p.model.name} on {p.cluster.gpu.name} has nothing of it: use another",
    source="Megatron-Core transformer_config.py: moe_act needs moe_grouped_gemm, mla_up_proj multi_latent_attention; "
    "transformer_layer.py: layernorm means norms of their own",
)
def light_modules(p: Instance, *, recompute: Any) -> Any:
    """Light recomputation needs Megatron-Core, and latent attention or experts by grouped products."""
    model, grouped = p.model, p.cluster.gpu.compute_capability >= GROUPED_PRODUCTS_SINCE
    there = p.framework in MEGATRON_LIKE and (model.mla is not None or model.moe is not None)
    there = there and (model.moe is None or grouped)
    return (np.asarray(recompute) != Recompute.LIGHT) | there


RULES = (
    light_modules,
    zero_alone,
    auto_tp_stages,
    whole_layers,
    deepspeed_precision,
    sharded_optimizer,
    context_needs_fused_attention,
    sinks_exchange_heads,
)
