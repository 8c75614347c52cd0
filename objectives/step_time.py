"""The step time: one tree that the evaluator sums, the solver bounds and the breakdown prints.

T = pipeline + exposed data-parallel traffic + exposed per-microbatch gathers + optimizer + fixed (+ a user's terms).

pipeline is the exact length of the schedule whose passes ``pass_times`` gives (objectives.schedule_length). The tree
holds a bound that never exceeds it: max over ranks i of (one microbatch's time ahead of i) + m * (its time on i). With
equal stages and the output layer on the last this is m*(L/p*t_layer + t_head) + (p-1)/v*(L/p)*t_layer. Where the
backward pass is split a rank may still make weight gradients when all others are done: it waits for the forward passes
ahead of it only.
Source: Narayanan et al. 2021, section 2.2.

Products are cancelled: m = GBS/(mbs*dp) and dp = N/(tp*cp*pp), so m*n_i*t = (pp*n_i) * (GBS*tp*cp/(N*mbs)*t), where the
second factor does not depend on pp, dp or m.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from parsolve.functions import Array, Part, StageMax, Term, term
from parsolve.objectives import (
    compute,
    context_comm,
    counts,
    data_comm,
    gradient_accumulation,
    launch,
    multi_token,
    optimizer_step,
    pipeline_comm,
)
from parsolve.objectives import layers as layer
from parsolve.objectives import tensor_comm as tensor
from parsolve.objectives.layers import (
    ATTENTION_TERMS,
    DENSE_HIDING_TERMS,
    DENSE_PIPELINED,
    DENSE_TERMS,
    HIDING_TERMS,
    MOE_HIDING_TERMS,
    MOE_PIPELINED,
    moe_terms,
)
from parsolve.objectives.schedule import Shape, shape_of
from parsolve.objectives.schedule_length import makespan
from parsolve.problem import Instance
from parsolve.splits import stages_in_model_order


@term(unit="1", source="m/pp = GBS*tp*cp/(N*mbs)")
def microbatch_share(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Microbatches per step and rank divided by pp."""
    return p.gbs * tp * cp / (p.world * mbs)


@term(unit="1", source="as step_time.items")
def forward_share(p: Instance, *, recompute: Any) -> Any:
    """The forward pass's share of a layer's time."""
    return 1.0 / compute.passes(p, recompute)


@term(unit="1", source="as step_time.items")
def ends_forward_share(p: Instance) -> Any:
    """The forward pass's share of the embedding's and the output layer's time."""
    return 1.0 / 3.0


@term(unit="1", source="as step_time.items")
def one_way(p: Instance) -> Any:
    """Share of a transfer that goes forward."""
    return 0.5


@term(unit="1", source="profile: dp_overlap")
def dp_overlap(p: Instance) -> Any:
    """Share of one microbatch's compute under which the gradient reduction hides."""
    return p.profile.dp_overlap * p.overlap


@term(unit="1", source="profile: gather_overlap")
def gather_share(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Microbatches per step and rank / pp, times the share of compute under which per-microbatch gathers hide."""
    return p.profile.gather_overlap * p.overlap * microbatch_share.compute(p, tp=tp, cp=cp, mbs=mbs)


HIDDEN = {
    context_comm.context_comm: context_comm.context_comm_hidden,
    pipeline_comm.overlapped_stage_transfer: pipeline_comm.overlapped_stage_transfer_hidden,
}


EMBEDDING_TERMS = (
    compute.embedding_lookup,
    tensor.embedding_tensor_comm,
    gradient_accumulation.embedding_accumulation,
)
HEAD_TERMS = (compute.output_layer, tensor.head_tensor_comm, gradient_accumulation.head_accumulation)
MTP_TERMS = (multi_token.mtp_projection, multi_token.mtp_tensor_comm, gradient_accumulation.mtp_accumulation)


def _last_layer_terms(p: Instance) -> tuple[Term, ...]:
    """A layer of the kind of the model's last one, as prediction modules have."""
    return (*ATTENTION_TERMS, *(moe_terms(p) if p.model.layer_is_moe[-1] else DENSE_TERMS))


def pipeline_time(p: Instance) -> StageMax:
    """The bound: microbatches through the slowest rank, after the wait for the first one."""
    parts: list[Part] = []
    has_dense, has_moe = p.model.num_dense_layers > 0, p.model.num_moe_layers > 0
    split = p.workload.splits_backward
    of_layers, of_ends, of_transfers = (forward_share, ends_forward_share, one_way) if split else (None,) * 3

    def layers(terms: tuple[Term, ...], here: Any, ahead: Any = None, waits: Term | None = of_layers) -> None:
        for t in terms:
            parts.append(Part(t, here, microbatch_share))
            if ahead is not None:
                parts.append(Part(t, ahead, waits, label="bubble"))

    layers(ATTENTION_TERMS, counts.layers_of_all, counts.layers_ahead)
    if has_dense:
        layers(DENSE_TERMS, counts.dense_layers_of_all, counts.dense_layers_ahead)
    if has_moe:
        layers(moe_terms(p), counts.moe_layers_of_all, counts.moe_layers_ahead)
    if np.any(p.profile.pipelined_member_time):  # zero for most stacks: then the solver need not carry it
        if has_dense:
            layers(DENSE_PIPELINED, counts.dense_layers_of_all_pipelined, counts.dense_layers_ahead)
        if has_moe:
            layers(MOE_PIPELINED, counts.moe_layers_of_all_pipelined, counts.moe_layers_ahead)
    if p.splits.with_recomputation:
        for kind, has in (("dense", has_dense), ("moe", has_moe)):
            if has:
                for again in _recomputation(p, kind):
                    layers(*again)
    layers(EMBEDDING_TERMS, counts.first_of_all, counts.embedding_ahead, of_ends)
    parts += [Part(t, counts.last_of_all, microbatch_share) for t in HEAD_TERMS]
    if p.mtp_layers:
        module = (*_last_layer_terms(p), *MTP_TERMS, *EMBEDDING_TERMS)
        parts += [Part(t, counts.mtp_modules_of_all, microbatch_share, label="mtp") for t in module]
        parts += [Part(t, counts.mtp_outputs_of_all, microbatch_share, label="mtp") for t in HEAD_TERMS]
        parts.append(Part(pipeline_comm.stage_payload, counts.mtp_states_received, microbatch_share))
        parts.append(Part(pipeline_comm.shape_exchange, counts.mtp_shape_exchanges, microbatch_share))
        hidden = pipeline_comm.overlapped_stage_transfer_hidden
        parts.append(Part(hidden, counts.mtp_waited_transfers, microbatch_share))
        if np.any(p.profile.pipelined_member_time):
            of_layer = MOE_PIPELINED if p.model.layer_is_moe[-1] else DENSE_PIPELINED
            here = counts.mtp_modules_of_all_pipelined
            parts += [Part(t, here, microbatch_share, label="mtp") for t in of_layer]
    parts.append(Part(pipeline_comm.stage_transfer, counts.plain_transfers, microbatch_share))
    parts.append(Part(pipeline_comm.overlapped_stage_transfer, counts.interleaved_transfers, microbatch_share))
    parts.append(Part(pipeline_comm.stage_transfer, counts.transfers_ahead, of_transfers, label="bubble"))
    return StageMax("pipeline", tuple(parts))


def _recomputation(p: Instance, kind: str) -> list[tuple[Any, ...]]:
    """Terms of the layers that recompute=block recomputes, how often each is paid, and ahead of a rank."""
    alone, pipelined = (getattr(layer, f"{kind}_{name}") for name in ("recomputation", "pipelined_recomputation"))
    of_all, of_one, of_several, ahead = (
        getattr(counts, f"{kind}_{name}")
        for name in ("recomputed_of_all", "recomputed_alone", "recomputed_pipelined", "recomputed_ahead")
    )
    if np.any(p.profile.pipelined_member_time):
        return [((alone,), of_one), ((pipelined,), of_several, ahead)]
    return [((alone,), of_all, ahead)]


class Passes(NamedTuple):
    """Times of one microbatch, s: forward and backward on each stage in model order, and the delay of a transfer.

    ``weight``: of the weight gradients, which ``backward`` is then without; None where the backward pass is whole.
    """

    forward: Array
    backward: Array
    delay: float
    weight: Array | None = None


class Items(NamedTuple):
    """Times of one microbatch, s, for one unit of what a stage can hold: (forward, backward) each.

    ``head``: the output layer with the prediction modules beside it, or with what comes from them on the stage before:
    then ``apart`` is their own time there, else 0. ``transfer`` occupies the rank in every pass;
    ``delay`` passes between two ranks while both compute. ``dense_again``, ``moe_again``: what recomputing a layer adds
    to its backward pass under recompute=block. ``weight``: how much of the backward time makes weight gradients (dense
    layer, MoE layer, output layer), where they are apart.
    """

    dense: tuple[Any, Any]
    moe: tuple[Any, Any]
    embedding: tuple[Any, Any]
    head: tuple[Any, Any]
    apart: tuple[Any, Any]
    transfer: Any
    delay: Any
    dense_again: Any
    moe_again: Any
    weight: tuple[Any, Any, Any] | None = None

    def rows(self, some: Any) -> Items:
        """The times of some of many configurations."""
        dense, moe, embedding, head, apart = ((there[some], back[some]) for there, back in self[:5])
        weight = (self.weight[0][some], self.weight[1][some], self.weight[2][some]) if self.weight else None
        transfer, delay, dense_again, moe_again = (time[some] for time in self[5:9])
        return Items(dense, moe, embedding, head, apart, transfer, delay, dense_again, moe_again, weight)

    def row(self, i: int) -> Items:
        """The times of one of many configurations."""
        dense, moe, embedding, head, apart = ((float(there[i]), float(back[i])) for there, back in self[:5])
        weight = (float(self.weight[0][i]), float(self.weight[1][i]), float(self.weight[2][i])) if self.weight else None
        transfer, delay, dense_again, moe_again = (float(time[i]) for time in self[5:9])
        return Items(dense, moe, embedding, head, apart, transfer, delay, dense_again, moe_again, weight)


def items(p: Instance, values: Mapping[str, Any]) -> Items:
    """The times of configurations, arrays with a value each.

    A layer's forward pass is 1/3 of its time, 1/4 when it is recomputed (``compute.passes``); the embedding's and the
    output layer's a third; of a transfer each direction pays half. A prediction module is made of all of these; on a
    stage of its own it sends a hidden state more to the output layer's, and an exchange of sizes that waits for the
    device precedes every transfer, so that none is hidden. Of the backward time the weight gradients take one forward's
    worth of the matrix products and of the kernel launches, and what is left of the gradients' accumulation; attention,
    elementwise operations, communication and what is recomputed before it belong to the gradients of inputs.
    """
    size = len(values["pp"])
    pipelined, plain = values["pp"] > 1, values["vpp"] == 1

    def total(terms: tuple[Term, ...]) -> Array:
        return np.asarray(np.broadcast_to(sum((t(p, values) for t in terms), 0.0), (size,)), dtype=float)

    def halves(time: Array, forward: Any) -> tuple[Array, Array]:
        return time * forward, time * (1.0 - forward)

    dense, moe = np.zeros(size), np.zeros(size)
    member = bool(p.profile.pipelined_member_time)
    if p.model.num_dense_layers:
        dense = total((*ATTENTION_TERMS, *DENSE_TERMS)) + (total(DENSE_PIPELINED) * pipelined if member else 0.0)
    if p.model.num_moe_layers:
        moe = total((*ATTENTION_TERMS, *moe_terms(p))) + (total(MOE_PIPELINED) * pipelined if member else 0.0)
    again = {"dense": np.zeros(size), "moe": np.zeros(size)}
    if p.splits.with_recomputation:
        for kind, has in (("dense", p.model.num_dense_layers), ("moe", p.model.num_moe_layers)):
            if has:
                alone, several = (
                    total((getattr(layer, f"{kind}_{name}"),)) for name in ("recomputation", "pipelined_recomputation")
                )
                again[kind] = np.where(pipelined, several, alone) if member else alone
    share = 1.0 / np.broadcast_to(compute.passes(p, values["recompute"]), (size,))
    embedding, head = (halves(total(terms), 1 / 3) for terms in (EMBEDDING_TERMS, HEAD_TERMS))
    in_line = np.where(plain, total((pipeline_comm.stage_transfer,)), total((pipeline_comm.overlapped_stage_transfer,)))
    hidden = np.where(plain, 0.0, total((pipeline_comm.overlapped_stage_transfer_hidden,)))
    apart = (np.zeros(size), np.zeros(size))
    if p.mtp_layers:
        n, own_stage = p.mtp_layers, p.splits.mtp_apart[values["split"]]
        in_line, hidden = in_line + own_stage * (hidden + total((pipeline_comm.shape_exchange,))), ~own_stage * hidden
        like_last = moe if p.model.layer_is_moe[-1] else dense
        layers = halves(like_last + total(MTP_TERMS), share)
        modules = (n * (layers[0] + embedding[0]), n * (layers[1] + embedding[1]))
        received = n * own_stage * total((pipeline_comm.stage_payload,)) / 2
        outputs = (head[0] * (1 + n) + received, head[1] * (1 + n) + received)
        head = (outputs[0] + ~own_stage * modules[0], outputs[1] + ~own_stage * modules[1])
        apart = (own_stage * modules[0], own_stage * modules[1])

    def weights(of: WeightTerms, forward: Any) -> Array:
        launches = total(of.launches) + (total(of.pipelined) * pipelined if member else 0.0)
        return np.asarray(total(of.products) + forward * launches + (1.0 - forward) * total(of.accumulation))

    weight = None
    if p.workload.splits_backward:
        weight = (weights(DENSE_WEIGHTS, share), weights(MOE_WEIGHTS, share), weights(HEAD_WEIGHTS, 1 / 3))
    return Items(
        halves(dense, share),
        halves(moe, share),
        embedding,
        head,
        apart,
        pipelined * in_line / 2,
        pipelined * hidden / 2,
        again["dense"],
        again["moe"],
        weight,
    )


class WeightTerms(NamedTuple):
    """Of which terms a unit's weight gradients are made."""

    products: tuple[Term, ...]
    accumulation: tuple[Term, ...]
    launches: tuple[Term, ...] = ()
    pipelined: tuple[Term, ...] = ()


DENSE_WEIGHTS = WeightTerms(
    (compute.attention_weight_gradients, compute.dense_weight_gradients),
    (gradient_accumulation.dense_layer_accumulation,),
    (launch.dense_launch,),
    DENSE_PIPELINED,
)
MOE_WEIGHTS = WeightTerms(
    (compute.attention_weight_gradients, compute.expert_weight_gradients),
    (gradient_accumulation.moe_layer_accumulation, gradient_accumulation.expert_accumulation),
    (launch.moe_launch,),
    MOE_PIPELINED,
)
HEAD_WEIGHTS = WeightTerms((compute.head_weight_gradients,), (gradient_accumulation.head_accumulation,))


def pass_times(of: Items, dense: Array, moe: Array, again: tuple[Array, Array] | None = None) -> Passes:
    """Times of every stage that holds ``dense`` and ``moe`` layers, arrays (…, stage) in model order.

    ``again``: how many of each are recomputed (recompute=block). Where weight gradients are apart, the first stage
    makes all of its gradients with them.
    """
    forward, backward = (
        dense * of.dense[i]
        + moe * of.moe[i]
        + of.transfer
        + _ends(dense.shape[-1], of.embedding[i], of.head[i], of.apart[i])
        for i in (0, 1)
    )
    if again is not None:
        backward = backward + again[0] * of.dense_again + again[1] * of.moe_again
    if of.weight is None:
        return Passes(forward, backward, of.delay)
    weight = dense * of.weight[0] + moe * of.weight[1] + _ends(dense.shape[-1], 0.0, of.weight[2])
    weight[..., 0] = backward[..., 0]
    return Passes(forward, backward - weight, of.delay, weight)


def _ends(stages: int, first: float, last: float, before_last: float = 0.0) -> Array:
    """``first`` on the first stage, ``last`` on the last, ``before_last`` on the one before it, 0 between."""
    extra = np.zeros(stages)
    extra[0] += first
    extra[-1] += last
    if before_last:
        extra[-2] += before_last
    return extra


def pipeline_length(p: Instance, values: Mapping[str, Any], of: Items, i: int) -> float:
    """Exact length of the schedule of row ``i`` of ``values``, whose ``split`` is a concrete cut, s."""
    return makespan(*schedule_of(p, values, of, i))


def schedule_of(
    p: Instance, values: Mapping[str, Any], of: Items, i: int
) -> tuple[Shape, Array, Array, float, Array | None]:
    """The shape, and what ``makespan`` takes after it, of the same row's schedule."""
    split = int(values["split"][i])
    dense, moe = _in_model_order(p, p.splits.contents[split])
    partly = p.splits.recomputed_contents(split)
    again = None if partly is None else _in_model_order(p, partly)
    pp = int(values["pp"][i])
    kind = p.workload.schedule if pp > 1 else "1f1b"  # one rank runs each microbatch forward and backward
    shape, one = shape_of(pp, int(values["vpp"][i]), int(values["grad_acc"][i]), kind), of.row(i)
    if not shape.splits_backward:
        one = one._replace(weight=None)
    return (shape, *pass_times(one, dense, moe, again))


def _in_model_order(p: Instance, contents: tuple[Array, Array]) -> tuple[Array, Array]:
    """(stage,) of each kind for (rank, chunk)."""
    dense, moe = (stages_in_model_order(layers, p.splits.schedule) for layers in contents)
    return dense, moe


def _hideable(p: Instance, weight: Term, of_all: bool) -> list[Part]:
    """Compute of the rank's layers under which data-parallel traffic can hide, as negative parts.

    Prediction modules come last forward and first backward, when there is hardly anything to send: they hide nothing.
    """
    parts = []
    here = (
        (counts.layers_hiding_of_all, counts.dense_layers_hiding_of_all, counts.moe_layers_hiding_of_all)
        if of_all
        else (counts.layers_hiding, counts.dense_layers_hiding, counts.moe_layers_hiding)
    )
    again = (
        (counts.dense_recomputed_of_all, counts.moe_recomputed_of_all)
        if of_all
        else (counts.dense_recomputed, counts.moe_recomputed)
    )
    partly = p.splits.with_recomputation
    parts += [Part(t, here[0], weight, -1) for t in HIDING_TERMS]
    if p.model.num_dense_layers:
        parts += [Part(t, here[1], weight, -1) for t in DENSE_HIDING_TERMS]
        parts += [Part(layer.dense_recomputation_hiding, again[0], weight, -1)] if partly else []
    if p.model.num_moe_layers:
        parts += [Part(t, here[2], weight, -1) for t in MOE_HIDING_TERMS]
        parts += [Part(layer.moe_recomputation_hiding, again[1], weight, -1)] if partly else []
    return parts


def _blocks(p: Instance, dense: Term, moe: Term, expert: Term, embedding: Term, head: Term, mtp: Term) -> list[Part]:
    """A quantity of every parameter block that a rank holds."""
    parts = []
    if p.model.num_dense_layers:
        parts.append(Part(dense, counts.dense_layers))
    if p.model.num_moe_layers:
        parts += [Part(moe, counts.moe_layers), Part(expert, counts.moe_layers)]
    parts += [Part(embedding, counts.is_first), Part(head, counts.has_own_head)]
    if p.mtp_layers:
        layer = (moe, expert) if p.model.layer_is_moe[-1] else (dense,)
        parts += [Part(t, counts.mtp_modules) for t in (*layer, mtp)]
        parts.append(Part(embedding, counts.mtp_embedding))
    return parts


def data_time(p: Instance) -> StageMax:
    """Gradient reduction and weight gathering once per step, less what the last microbatch's compute hides."""
    blocks = _blocks(
        p,
        data_comm.dense_layer_reduction,
        data_comm.moe_layer_reduction,
        data_comm.expert_reduction if p.workload.shard_group is None else data_comm.grouped_expert_reduction,
        data_comm.embedding_reduction,
        data_comm.head_reduction,
        data_comm.mtp_reduction,
    )
    return StageMax("dp_comm", (*blocks, *_hideable(p, dp_overlap, of_all=False)), at_least_zero=True)


def gather_time(p: Instance) -> StageMax:
    """ZeRO-2 and 3 traffic of every microbatch, less what compute hides."""
    blocks = _blocks(
        p,
        data_comm.dense_layer_gather,
        data_comm.moe_layer_gather,
        data_comm.expert_gather if p.workload.shard_group is None else data_comm.grouped_expert_gather,
        data_comm.embedding_gather,
        data_comm.head_gather,
        data_comm.mtp_gather,
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
                optimizer_step.expert_update
                if p.workload.shard_group is None
                else optimizer_step.grouped_expert_update,
                optimizer_step.embedding_update,
                optimizer_step.head_update,
                optimizer_step.mtp_update,
            )
        ),
    )


def tied_embedding_time(p: Instance) -> StageMax:
    """The all-reduce of an embedding that first and last stage both hold: tied, or for multi-token prediction."""
    return StageMax("dp_comm", (Part(data_comm.tied_embedding_reduction, counts.tied_copy),))


def step_time(p: Instance) -> tuple[StageMax, ...]:
    """The summands of the step time, in seconds."""
    own = tuple(StageMax(t.name, (Part(t),)) for t in p.problem.terms)
    tied: tuple[StageMax, ...] = (tied_embedding_time(p),) if p.model.tied_embeddings or p.mtp_layers else ()
    if np.any(p.profile.shard_member_time):  # zero for most stacks
        tied += (StageMax("dp_comm", (Part(optimizer_step.shard_broadcast),)),)
    fixed = StageMax("fixed", (Part(optimizer_step.step_overhead),))
    return (pipeline_time(p), data_time(p), gather_time(p), optimizer_time(p), *tied, fixed, *own)
