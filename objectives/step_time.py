"""The step time: one tree that the evaluator sums, the solver bounds and the breakdown prints.

T = pipeline + exposed data-parallel traffic + exposed per-microbatch gathers + optimizer + fixed (+ a user's terms).

pipeline = max over ranks i of (time of one microbatch ahead of i) + m * (time of one microbatch on i). With equal
stages and the output layer on the last this is m*(L/p*t_layer + t_head) + (p-1)/v*(L/p)*t_layer, the 1F1B schedule's
time; with unequal stages it never exceeds the schedule's true time.
Source: Narayanan et al. 2021, section 2.2.

Products are cancelled: m = GBS/(mbs*dp) and dp = N/(tp*cp*pp), so m*n_i*t = (pp*n_i) * (GBS*tp*cp/(N*mbs)*t), where the
second factor does not depend on pp, dp or m.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import Part, StageMax, Term, term
from parsolve.objectives import (
    compute,
    context_comm,
    counts,
    data_comm,
    expert_comm,
    gradient_accumulation,
    launch,
    optimizer_step,
    pipeline_comm,
)
from parsolve.objectives import tensor_comm as tensor
from parsolve.problem import Instance


@term(unit="1", source="m/pp = GBS*tp*cp/(N*mbs)")
def microbatch_share(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Microbatches per step and rank divided by pp."""
    return p.gbs * tp * cp / (p.world * mbs)


@term(unit="1", source="profile: dp_overlap")
def dp_overlap(p: Instance) -> Any:
    """Share of one microbatch's compute under which the gradient reduction hides."""
    return p.profile.dp_overlap * p.overlap


@term(unit="1", source="profile: gather_overlap")
def gather_share(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Microbatches per step and rank / pp, times the share of compute under which per-microbatch gathers hide."""
    return p.profile.gather_overlap * p.overlap * microbatch_share.compute(p, tp=tp, cp=cp, mbs=mbs)


ATTENTION_TERMS = (
    compute.attention_projections,
    compute.attention_core,
    compute.attention_elementwise,
    tensor.attention_tensor_comm,
    context_comm.context_comm,
)
DENSE_TERMS = (
    compute.dense_mlp,
    tensor.mlp_tensor_comm,
    launch.dense_launch,
    gradient_accumulation.dense_layer_accumulation,
)
MOE_TERMS = (
    compute.shared_experts,
    compute.routed_experts,
    expert_comm.expert_comm,
    launch.moe_launch,
    gradient_accumulation.moe_layer_accumulation,
    gradient_accumulation.expert_accumulation,
)
HIDDEN = {
    context_comm.context_comm: context_comm.context_comm_hidden,
    pipeline_comm.overlapped_stage_transfer: pipeline_comm.overlapped_stage_transfer_hidden,
}


def _moe_terms(p: Instance) -> tuple[Term, ...]:
    """MoE layers with shared experts also pay the tensor-parallel traffic of an MLP."""
    shared = p.model.moe is not None and p.model.moe.shared_ffn_size > 0
    return (*MOE_TERMS, tensor.mlp_tensor_comm) if shared else MOE_TERMS


def pipeline_time(p: Instance) -> StageMax:
    """Microbatches through the slowest rank, after the wait for the first one."""
    parts: list[Part] = []
    has_dense, has_moe = p.model.num_dense_layers > 0, p.model.num_moe_layers > 0

    def layers(terms: tuple[Term, ...], here: Any, ahead: Any) -> None:
        for t in terms:
            parts.append(Part(t, here, microbatch_share))
            parts.append(Part(t, ahead, label="bubble"))

    layers(ATTENTION_TERMS, counts.layers_of_all, counts.layers_ahead)
    if has_dense:
        layers(DENSE_TERMS, counts.dense_layers_of_all, counts.dense_layers_ahead)
    if has_moe:
        layers(_moe_terms(p), counts.moe_layers_of_all, counts.moe_layers_ahead)
    if np.any(p.profile.pipelined_member_time):  # zero for most stacks: then the solver need not carry it
        parts += _pipelined_launch(p)
    first = (compute.embedding_lookup, tensor.embedding_tensor_comm, gradient_accumulation.embedding_accumulation)
    for t in first:
        parts.append(Part(t, counts.first_of_all, microbatch_share))
        parts.append(Part(t, counts.embedding_ahead, label="bubble"))
    last = (compute.output_layer, tensor.head_tensor_comm, gradient_accumulation.head_accumulation)
    parts += [Part(t, counts.last_of_all, microbatch_share) for t in last]
    parts.append(Part(pipeline_comm.stage_transfer, counts.plain_transfers, microbatch_share))
    parts.append(Part(pipeline_comm.overlapped_stage_transfer, counts.interleaved_transfers, microbatch_share))
    parts.append(Part(pipeline_comm.stage_transfer, counts.transfers_ahead, label="bubble"))
    return StageMax("pipeline", tuple(parts))


def _pipelined_launch(p: Instance) -> list[Part]:
    """Host time that only pipelined runs pay; on the way of the first microbatch as well."""
    parts: list[Part] = []
    if p.model.num_dense_layers:
        parts.append(Part(launch.dense_pipelined_launch, counts.dense_layers_of_all_pipelined, microbatch_share))
        parts.append(Part(launch.dense_pipelined_launch, counts.dense_layers_ahead, label="bubble"))
    if p.model.num_moe_layers:
        parts.append(Part(launch.moe_pipelined_launch, counts.moe_layers_of_all_pipelined, microbatch_share))
        parts.append(Part(launch.moe_pipelined_launch, counts.moe_layers_ahead, label="bubble"))
    return parts


def _hideable(p: Instance, weight: Term, of_all: bool) -> list[Part]:
    """Compute of the rank's layers under which data-parallel traffic can hide, as negative parts."""
    parts = []
    here = (
        (counts.layers_of_all, counts.dense_layers_of_all, counts.moe_layers_of_all)
        if of_all
        else (counts.all_layers, counts.dense_layers, counts.moe_layers)
    )
    parts += [Part(t, here[0], weight, -1) for t in (compute.attention_projections, compute.attention_core)]
    if p.model.num_dense_layers:
        parts.append(Part(compute.dense_mlp, here[1], weight, -1))
    if p.model.num_moe_layers:
        parts += [Part(t, here[2], weight, -1) for t in (compute.shared_experts, compute.routed_experts)]
    return parts


def _blocks(p: Instance, dense: Term, moe: Term, expert: Term, embedding: Term, head: Term) -> list[Part]:
    """A quantity of every parameter block that a rank holds."""
    parts = []
    if p.model.num_dense_layers:
        parts.append(Part(dense, counts.dense_layers))
    if p.model.num_moe_layers:
        parts += [Part(moe, counts.moe_layers), Part(expert, counts.moe_layers)]
    return [*parts, Part(embedding, counts.is_first), Part(head, counts.has_own_head)]


def data_time(p: Instance) -> StageMax:
    """Gradient reduction and weight gathering once per step, less what the last microbatch's compute hides."""
    blocks = _blocks(
        p,
        data_comm.dense_layer_reduction,
        data_comm.moe_layer_reduction,
        data_comm.expert_reduction,
        data_comm.embedding_reduction,
        data_comm.head_reduction,
    )
    return StageMax("dp_comm", (*blocks, *_hideable(p, dp_overlap, of_all=False)), at_least_zero=True)


def gather_time(p: Instance) -> StageMax:
    """ZeRO-2 and 3 traffic of every microbatch, less what compute hides."""
    blocks = _blocks(
        p,
        data_comm.dense_layer_gather,
        data_comm.moe_layer_gather,
        data_comm.expert_gather,
        data_comm.embedding_gather,
        data_comm.head_gather,
    )
    return StageMax("gather_comm", (*blocks, *_hideable(p, gather_share, of_all=True)), at_least_zero=True)


def optimizer_time(p: Instance) -> StageMax:
    """Optimizer pass on the rank with the most parameters."""
    return StageMax(
        "optimizer",
        tuple(
            _blocks(
                p,
                optimizer_step.dense_layer_update,
                optimizer_step.moe_layer_update,
                optimizer_step.expert_update,
                optimizer_step.embedding_update,
                optimizer_step.head_update,
            )
        ),
    )


def tied_embedding_time(p: Instance) -> StageMax:
    """The extra all-reduce of tied embeddings when first and last stage differ."""
    return StageMax("dp_comm", (Part(data_comm.tied_embedding_reduction, counts.tied_copy),))


def step_time(p: Instance) -> tuple[StageMax, ...]:
    """The summands of the step time, in seconds."""
    own = tuple(StageMax(t.name, (Part(t),)) for t in p.problem.terms)
    tied: tuple[StageMax, ...] = (tied_embedding_time(p),) if p.model.tied_embeddings else ()
    if np.any(p.profile.shard_member_time):  # zero for most stacks
        tied += (StageMax("dp_comm", (Part(optimizer_step.shard_broadcast),)),)
    fixed = StageMax("fixed", (Part(optimizer_step.step_overhead),))
    return (pipeline_time(p), data_time(p), gather_time(p), optimizer_time(p), *tied, fixed, *own)
