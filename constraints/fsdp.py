"""PyTorch's FSDP2 launchers: torchtitan, which has every kind of parallelism, and Accelerate, data parallel alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.constraints.framework import first_reason
from parsolve.functions import rule
from parsolve.problem import Instance
from parsolve.specs import MLA, Model, MoE, Recompute

FSDP = ("torchtitan", "accelerate")
PRECISIONS = {"torchtitan": ("bf16", "fp8"), "accelerate": ("bf16", "fp16")}
OPTIMIZERS = {"torchtitan": ("adam",), "accelerate": ("adam", "sgd")}


def torchtitan_gap(model: Model) -> str | None:
    """The first feature of the model that none of torchtitan's families has, None when it can be built.

    Families: llama3 (dense), qwen3 (norms of queries and keys; dense or mixture), deepseek_v3 (latent attention with
    experts). Source: torchtitan 0.3, models/*/__init__.py.
    """
    reasons = [
        (model.position != "rope" or model.rope_fraction != 1, "positions other than full rotary ones"),
        (model.norm != "rms" or model.norm_bias, "layer norms"),
        (model.norms_per_layer != 2 or not model.final_norm, "layers without exactly two norms"),
        (model.embedding_norm, "a norm after the embedding"),
        (model.embedding_size is not None, "an embedding of another width than its layers"),
        (model.extra_layer_params > 0, "further small parameters in its layers (extra_layer_params)"),
        (not model.gated_mlp or model.activation != "silu", "an MLP other than gated SiLU"),
        (model.qkv_bias or model.attention_out_bias or model.mlp_bias or model.head_bias, "linear biases"),
        (model.window is not None, "sliding windows in these families"),
        (model.attention_sinks, "attention sinks in these families"),
    ]
    if model.mla:
        reasons += _latent_gaps(model, model.mla, model.moe)
    else:
        reasons += _plain_gaps(model, model.moe)
    return first_reason(reasons)


def _plain_gaps(model: Model, moe: MoE | None) -> list[tuple[bool, str]]:
    narrow = model.num_heads * model.head_dim != model.hidden_size
    reasons = [
        (model.qk_norm == "full", "a norm over all heads"),
        (model.qk_norm == "none" and narrow, "heads of their own width without norms of queries and keys"),
    ]
    if moe:
        reasons += [
            (model.qk_norm != "head", "experts without norms of queries and keys"),
            (bool(moe.shared_ffn_size), "shared experts without latent attention"),
            (bool(moe.dense_layers), "dense layers in a mixture of experts without latent attention"),
            (moe.router_score != "softmax" or moe.num_groups is not None, "this routing without latent attention"),
            (moe.expert_bias or moe.router_bias, "biases of experts"),
            (model.tied_embeddings, "tied embeddings in a mixture of experts"),
        ]
    return reasons


def _latent_gaps(model: Model, mla: MLA, moe: MoE | None) -> list[tuple[bool, str]]:
    if moe is None:
        return [(True, "latent attention without experts")]
    shared = moe.shared_ffn_size
    return [
        (model.tied_embeddings, "tied embeddings with latent attention"),
        (shared == 0 or shared % moe.ffn_size > 0, "latent attention without whole shared experts"),
        (moe.shared_gate, "a gate on the shared experts"),
        (tuple(sorted(moe.dense_layers)) != tuple(range(len(moe.dense_layers))), "dense layers between expert layers"),
        (moe.expert_bias or moe.router_bias, "biases of experts"),
    ]


@rule(
    "zero={zero} with pp={pp}: FSDP is zero=0, 2 or 3 without a pipeline; in one, gradients stay whole until the last"
    " microbatch, which is zero=0 or 1",
    frameworks=FSDP,
    source="PyTorch fully_shard: gradients reduce-scattered every microbatch; pipelining/stage.py: with the last",
)
def fsdp_stages(p: Instance, *, zero: Any, pp: Any) -> Any:
    """FSDP2 keeps weights gathered (2) or gathers them again (3); a pipeline also keeps whole gradients (1)."""
    return np.where(np.asarray(pp) == 1, np.asarray(zero) != 1, np.asarray(zero) <= 1)


@rule(
    "zero=0 with cp={cp}: torchtitan's context-parallel ranks always share the FSDP group; shard them with zero >= 1",
    frameworks=("torchtitan",),
    source="torchtitan distributed/parallel_dims.py: fsdp = dp_shard * cp",
)
def context_shards(p: Instance, *, zero: Any, cp: Any) -> Any:
    """Context parallelism in torchtitan shards the weights as well."""
    return (np.asarray(zero) != 0) | (cp == 1)


@rule(
    "ep={ep}, etp={etp}, tp={tp}: torchtitan forms expert groups out of tensor-parallel ranks: etp=1 and ep a multiple"
    " of tp, or ep=1 and etp=tp",
    frameworks=("torchtitan",),
    source="torchtitan distributed/parallel_dims.py: efsdp * ep = dp_shard * cp * tp",
)
def borrowed_experts(p: Instance, *, ep: Any, etp: Any, tp: Any) -> Any:
    """Expert parallelism takes over the tensor-parallel ranks, or experts are divided like the dense layers."""
    whole = (np.asarray(etp) == 1) & (np.asarray(ep) % tp == 0)
    return np.where(np.asarray(ep) > 1, whole, np.asarray(etp) == tp) | (p.model.moe is None)


@rule(
    "cp={cp} does not divide the shard group of {p.workload.shard_group}: torchtitan's group is dp_shard * cp",
    frameworks=("torchtitan",),
    needs="shard_group",
    source="torchtitan distributed/parallel_dims.py: fsdp = dp_shard * cp",
)
def context_in_shard_group(p: Instance, *, cp: Any, zero: Any, shards: Any) -> Any:
    """Context-parallel ranks lie in one shard group."""
    group = p.workload.shard_group
    return (np.asarray(zero) == 0) | (np.asarray(shards) <= group) | (group % np.asarray(cp) == 0)


@rule(
    "zero=0 with ep={ep} over tp={tp}: torchtitan takes expert ranks from sharded ones; shard with zero >= 1",
    frameworks=("torchtitan",),
    source="torchtitan distributed/parallel_dims.py: ep divides dp_shard * cp * tp",
)
def experts_in_shards(p: Instance, *, zero: Any, ep: Any, tp: Any) -> Any:
    """Replicas hold whole experts."""
    return (np.asarray(zero) != 0) | (np.asarray(ep) <= tp)


@rule(
    "pp={pp} with tied embeddings: torchtitan cannot split them over a pipeline; use pp=1",
    frameworks=("torchtitan",),
    source="torchtitan models/common/decoder.py: weight tying is not supported with pipeline parallelism",
)
def tied_pipeline(p: Instance, *, pp: Any) -> Any:
    """torchtitan ties embeddings on one stage only."""
    return (np.asarray(pp) == 1) | (not p.model.tied_embeddings)


@rule(
    "recompute={recompute}: {p.framework} has no recomputation of core attention alone; use none or full",
    frameworks=FSDP,
    source="torchtitan activation_checkpoint.py saves chosen operators; FSDP wraps whole layers",
)
def fsdp_recompute(p: Instance, *, recompute: Any) -> Any:
    """What these launchers call selective keeps other tensors than the estimate counts."""
    return np.asarray(recompute) != Recompute.SELECTIVE


@rule(
    "{p.framework} does not train in {p.workload.precision}: choose another --precision",
    frameworks=FSDP,
    source="torchtitan config/configs.py: mixed_precision_param; accelerate: --mixed_precision",
)
def fsdp_precision(p: Instance) -> Any:
    """torchtitan: bf16 and fp8; Accelerate: bf16 and fp16."""
    return np.bool_(p.workload.precision in PRECISIONS.get(p.framework, ()))


@rule(
    "torchtitan has no {p.workload.optimizer}: use --optimizer adam",
    frameworks=FSDP,
    source="torchtitan components/optimizer",
)
def fsdp_optimizer(p: Instance) -> Any:
    """torchtitan's optimizers are of the Adam kind."""
    return np.bool_(p.workload.optimizer in OPTIMIZERS.get(p.framework, ()))


@rule(
    "{p.model.name} is none of torchtitan's families (llama3, qwen3, deepseek_v3): use another framework",
    frameworks=("torchtitan",),
    source="torchtitan models: llama3, qwen3, deepseek_v3",
)
def torchtitan_family(p: Instance) -> Any:
    """A shape that llama3, qwen3 or deepseek_v3 can take."""
    return np.bool_(torchtitan_gap(p.model) is None)


@rule(
    "tp={tp}, pp={pp}, cp={cp}, ep={ep}: Accelerate's FSDP plans are data parallel alone, so all four are 1",
    frameworks=("accelerate",),
    source="accelerate utils/dataclasses.py: FullyShardedDataParallelPlugin",
)
def data_parallel_alone(p: Instance, *, tp: Any, pp: Any, cp: Any, ep: Any) -> Any:
    """Accelerate is offered for sharded data parallelism of any Hugging Face model."""
    return (np.asarray(tp) == 1) & (pp == 1) & (cp == 1) & (ep == 1)


RULES = (
    fsdp_stages,
    context_shards,
    context_in_shard_group,
    borrowed_experts,
    experts_in_shards,
    tied_pipeline,
    fsdp_recompute,
    fsdp_precision,
    fsdp_optimizer,
    torchtitan_family,
    data_parallel_alone,
)
