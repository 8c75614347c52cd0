"""How often a per-layer or per-stage quantity is paid on a pipeline rank: functions of the cut and the stage.

All are linear in what the rank holds (``Splits.features``), so that a solver may ask for any cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import count
from parsolve.problem import Instance
from parsolve.specs.workload import FOLDED
from parsolve.splits import KEPT_IN_FLIGHT


def _of(p: Instance, name: str, split: Any, stage: Any) -> Any:
    return p.splits.features[name][split, stage]


def _recomputed(p: Instance, name: str, split: Any, stage: Any) -> Any:
    """One of ``splits.RECOMPUTED``; 0 on all cuts where none has recomputed layers."""
    if not p.splits.with_recomputation:
        return 0.0 * p.splits.rank[split, stage]
    return _of(p, name, split, stage)


@count
def dense_layers(p: Instance, *, split: Any, stage: Any) -> Any:
    """Layers with a plain MLP on the rank."""
    return _of(p, "dense", split, stage)


@count
def moe_layers(p: Instance, *, split: Any, stage: Any) -> Any:
    """Layers with experts on the rank."""
    return _of(p, "moe", split, stage)


@count
def is_first(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the first rank: it holds the embedding."""
    return _of(p, "first", split, stage)


@count
def is_last(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the last rank: it holds the output layer."""
    return _of(p, "last", split, stage)


@count
def has_own_head(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the last stage's rank when it keeps an output matrix of its own: untied, or tied on another rank."""
    return _of(p, "last", split, stage) * (_apart(p, split) | (not p.model.tied_embeddings))


def _apart(p: Instance, split: Any) -> Any:
    """Whether the first and the last stage are on different ranks."""
    return (p.splits.pp[split] > 1) & (p.workload.schedule not in FOLDED)


@count
def has_shared_head(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the rank that has both ends of a model with tied embeddings."""
    return _of(p, "last", split, stage) - has_own_head.compute(p, split=split, stage=stage)


@count
def tied_copy(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where tied embeddings have a second copy on another rank."""
    return _apart(p, split) * 1 + 0 * p.splits.rank[split, stage]


@count
def dense_layers_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's dense layers: layers of the whole model if every rank were like this one."""
    return p.splits.pp[split] * _of(p, "dense", split, stage)


@count
def moe_layers_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's MoE layers."""
    return p.splits.pp[split] * _of(p, "moe", split, stage)


@count
def layers_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's layers."""
    return p.splits.pp[split] * (_of(p, "dense", split, stage) + _of(p, "moe", split, stage))


@count
def dense_layers_of_all_pipelined(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's dense layers where there is more than one stage, else 0."""
    return np.where(p.splits.pp[split] > 1, p.splits.pp[split], 0) * _of(p, "dense", split, stage)


@count
def moe_layers_of_all_pipelined(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's MoE layers where there is more than one stage, else 0."""
    return np.where(p.splits.pp[split] > 1, p.splits.pp[split], 0) * _of(p, "moe", split, stage)


@count
def dense_recomputed(p: Instance, *, split: Any, stage: Any) -> Any:
    """The rank's dense layers that are recomputed: of each chunk the first few (recompute=block)."""
    return _recomputed(p, "dense_recomputed", split, stage)


@count
def moe_recomputed(p: Instance, *, split: Any, stage: Any) -> Any:
    """The rank's MoE layers that are recomputed."""
    return _recomputed(p, "moe_recomputed", split, stage)


@count
def dense_recomputed_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's dense layers that are recomputed."""
    return p.splits.pp[split] * _recomputed(p, "dense_recomputed", split, stage)


@count
def moe_recomputed_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's MoE layers that are recomputed."""
    return p.splits.pp[split] * _recomputed(p, "moe_recomputed", split, stage)


@count
def dense_recomputed_alone(p: Instance, *, split: Any, stage: Any) -> Any:
    """The dense layers that are recomputed where there is one stage, else 0."""
    return (p.splits.pp[split] == 1) * _recomputed(p, "dense_recomputed", split, stage)


@count
def moe_recomputed_alone(p: Instance, *, split: Any, stage: Any) -> Any:
    """The MoE layers that are recomputed where there is one stage, else 0."""
    return (p.splits.pp[split] == 1) * _recomputed(p, "moe_recomputed", split, stage)


@count
def dense_recomputed_pipelined(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's dense layers that are recomputed where there is more than one stage, else 0."""
    return np.where(p.splits.pp[split] > 1, dense_recomputed_of_all.compute(p, split=split, stage=stage), 0)


@count
def moe_recomputed_pipelined(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's MoE layers that are recomputed where there is more than one stage, else 0."""
    return np.where(p.splits.pp[split] > 1, moe_recomputed_of_all.compute(p, split=split, stage=stage), 0)


@count
def dense_recomputed_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """Recomputed dense layers in the first chunks of all earlier ranks."""
    return _recomputed(p, "dense_recomputed_ahead", split, stage)


@count
def moe_recomputed_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """Recomputed MoE layers in the first chunks of all earlier ranks."""
    return _recomputed(p, "moe_recomputed_ahead", split, stage)


@count
def rebuilds_dense(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where the rank rebuilds a dense layer on top of all it holds: one of its chunks keeps no layer.

    A chunk's last layers are those that are kept; their activations are freed before the others are rebuilt, so that a
    chunk with a kept layer never holds more than at the start of its backward pass.
    """
    return _recomputed(p, "rebuilds_dense", split, stage)


@count
def rebuilds_moe(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where the rank rebuilds an MoE layer on top of all it holds: one of its chunks recomputes all it has."""
    return _recomputed(p, "rebuilds_moe", split, stage)


@count
def dense_layers_hiding(p: Instance, *, split: Any, stage: Any) -> Any:
    """The rank's dense layers, under whose compute traffic hides."""
    return _of(p, "dense_hiding", split, stage)


@count
def moe_layers_hiding(p: Instance, *, split: Any, stage: Any) -> Any:
    """The rank's MoE layers, under whose compute traffic hides."""
    return _of(p, "moe_hiding", split, stage)


@count
def layers_hiding(p: Instance, *, split: Any, stage: Any) -> Any:
    """The rank's layers, under whose compute traffic hides."""
    return _of(p, "dense_hiding", split, stage) + _of(p, "moe_hiding", split, stage)


@count
def dense_layers_hiding_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's dense layers, under whose compute traffic hides."""
    return p.splits.pp[split] * _of(p, "dense_hiding", split, stage)


@count
def moe_layers_hiding_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's MoE layers, under whose compute traffic hides."""
    return p.splits.pp[split] * _of(p, "moe_hiding", split, stage)


@count
def layers_hiding_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's layers, under whose compute traffic hides."""
    return p.splits.pp[split] * (_of(p, "dense_hiding", split, stage) + _of(p, "moe_hiding", split, stage))


@count
def first_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp on the first rank."""
    return p.splits.pp[split] * _of(p, "first", split, stage)


@count
def last_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp on the last rank."""
    return p.splits.pp[split] * _of(p, "last", split, stage)


@count
def mtp_modules(p: Instance, *, split: Any, stage: Any) -> Any:
    """Multi-token-prediction modules that are trained, on the rank of their stage: the output layer's, or that before.

    Their passes through the output layer are made where that is.
    """
    return p.mtp_layers * _of(p, "mtp", split, stage)


@count
def mtp_beside(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the rank that has the modules where they are beside the output layer."""
    return ~p.splits.mtp_apart[split] * _of(p, "mtp", split, stage)


@count
def mtp_apart(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the rank that has the modules where the output layer is on another."""
    return p.splits.mtp_apart[split] * _of(p, "mtp", split, stage)


@count
def mtp_modules_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Modules times the microbatches whose activations are held for them: one beside the output layer."""
    return p.mtp_layers * p.splits.in_flight("mtp_in_flight", split, stage, grad_acc)


@count
def mtp_outputs(p: Instance, *, split: Any, stage: Any) -> Any:
    """Passes of modules through the output layer, where that is.

    Source: Megatron-Core gpt_model.py, process_mtp_loss (where post_process is).
    """
    return p.mtp_layers * _of(p, "last", split, stage)


@count
def mtp_outputs_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's passes of modules through the output layer."""
    return p.splits.pp[split] * mtp_outputs.compute(p, split=split, stage=stage)


@count
def mtp_states_received(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp on the last rank, once a module, where the modules' hidden states come from another rank, else 0.

    Source: Megatron-Core multi_token_prediction.py: what a module puts out is sent on behind the model's own.
    """
    return p.splits.mtp_apart[split] * mtp_outputs_of_all.compute(p, split=split, stage=stage)


@count
def mtp_modules_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's multi-token-prediction modules."""
    return p.splits.pp[split] * mtp_modules.compute(p, split=split, stage=stage)


@count
def mtp_modules_of_all_pipelined(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's multi-token-prediction modules where there is more than one stage, else 0."""
    return np.where(p.splits.pp[split] > 1, p.splits.pp[split], 0) * mtp_modules.compute(p, split=split, stage=stage)


@count
def mtp_shape_exchanges(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the transfers of a microbatch where prediction modules are on a stage apart, else 0."""
    every = plain_transfers.compute(p, split=split, stage=stage)
    return p.splits.mtp_apart[split] * (every + interleaved_transfers.compute(p, split=split, stage=stage))


@count
def mtp_waited_transfers(p: Instance, *, split: Any, stage: Any) -> Any:
    """Of these, those that compute would hide in the interleaved schedule."""
    return p.splits.mtp_apart[split] * interleaved_transfers.compute(p, split=split, stage=stage)


@count
def mtp_embedding(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the rank of several that has the modules: they look tokens up in a copy of the embedding there.

    Source: Megatron-Core gpt_model.py, pre_process or mtp_process.
    """
    return _of(p, "mtp", split, stage) * (p.splits.pp[split] > 1)


@count
def dense_layers_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """Dense layers in the first chunks of all earlier ranks: what the first microbatch passes before this rank."""
    return _of(p, "dense_ahead", split, stage)


@count
def moe_layers_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """MoE layers in the first chunks of all earlier ranks."""
    return _of(p, "moe_ahead", split, stage)


@count
def layers_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """All layers in the first chunks of all earlier ranks."""
    return _of(p, "dense_ahead", split, stage) + _of(p, "moe_ahead", split, stage)


@count
def embedding_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on every rank but the first: the first microbatch passes the embedding before it."""
    return _of(p, "embedding_ahead", split, stage)


@count
def plain_transfers(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp where stages exchange activations once per microbatch and direction (no virtual pipeline)."""
    pp, vpp = p.splits.pp[split], p.splits.vpp[split]
    return np.where((pp > 1) & (vpp == 1), pp, 0) + 0 * p.splits.rank[split, stage]


@count
def interleaved_transfers(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp*vpp where each chunk exchanges activations (virtual pipeline)."""
    pp, vpp = p.splits.pp[split], p.splits.vpp[split]
    return np.where((pp > 1) & (vpp > 1), pp * vpp, 0) + 0 * p.splits.rank[split, stage]


@count
def transfers_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """Stage boundaries that the first microbatch crosses before this rank."""
    return _of(p, "hops_ahead", split, stage)


def _in_flight(p: Instance, name: str, held: str, split: Any, stage: Any, grad_acc: Any) -> Any:
    """``held`` times the microbatches in flight; GPipe holds all of them on every rank of a pipeline."""
    plain = p.splits.in_flight(name, split, stage, grad_acc)
    if p.workload.schedule != "gpipe":
        return plain
    layers = _of(p, held, split, stage)
    if name in KEPT_IN_FLIGHT:
        again = _recomputed(p, f"{held}_recomputed", split, stage)
        layers = np.where(p.splits.recomputed[split] > 0, layers - again, 0.0)
    return np.where(p.splits.pp[split] > 1, layers * grad_acc, plain)


@count
def dense_layers_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Dense layers times the microbatches whose activations are held for them, at the rank's worst moment.

    1F1B: min(m, p-i) microbatches. Interleaved in groups of p: at most 2*(p-1-i) + (v-1)*p + 1 chunks, of which those
    with the most layers at a time count. GPipe: all m. Where the backward pass is split, those whose weight gradients
    are not made yet, by the order of passes. Source: Narayanan et al. 2021, section 2.2; Megatron-Core's schedules.py;
    Huang et al. 2019; PyTorch's pipelining/schedules.py.
    """
    return _in_flight(p, "dense_in_flight", "dense", split, stage, grad_acc)


@count
def moe_layers_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """MoE layers times the microbatches whose activations are held for them, at the rank's worst moment."""
    return _in_flight(p, "moe_in_flight", "moe", split, stage, grad_acc)


@count
def dense_kept_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Dense layers that are not recomputed, where others are, times the microbatches that they are held for.

    At the worst moment for them alone: where chunks differ, never fewer than at the moment at which all bytes together
    are most.
    """
    return _in_flight(p, "dense_kept_in_flight", "dense", split, stage, grad_acc)


@count
def moe_kept_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """MoE layers that are not recomputed, where others are, times the microbatches that they are held for."""
    return _in_flight(p, "moe_kept_in_flight", "moe", split, stage, grad_acc)


@count
def embeddings_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Embedding outputs held on the first rank: min(m, p), under GPipe m, else by the order of passes."""
    return _in_flight(p, "embedding_in_flight", "first", split, stage, grad_acc)


@count
def gpipe_outputs_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Microbatches whose logits the last rank of a GPipe pipeline keeps: all m, as no backward pass starts earlier."""
    return _of(p, "last", split, stage) * np.where(p.splits.pp[split] > 1, grad_acc, 1)


@count
def gpipe_mtp_modules_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Prediction modules times the microbatches whose activations and logits a GPipe pipeline keeps for them: all m."""
    return p.mtp_layers * gpipe_outputs_in_flight.compute(p, split=split, stage=stage, grad_acc=grad_acc)


@count
def dense_layers_waiting(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Dense layers times the microbatches between their input and their weight gradients, at the rank's worst moment.

    0 where the schedule makes both at once, and for the first stage, which has no input gradients.
    """
    return _waiting(p, "dense_waiting", split, stage, grad_acc)


@count
def moe_layers_waiting(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """MoE layers times the microbatches between their input and their weight gradients, at the rank's worst moment."""
    return _waiting(p, "moe_waiting", split, stage, grad_acc)


@count
def heads_waiting(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Microbatches that wait for the output layer's weight gradient while the logits of another are in use."""
    return _waiting(p, "head_waiting", split, stage, grad_acc)


def _waiting(p: Instance, name: str, split: Any, stage: Any, grad_acc: Any) -> Any:
    if p.workload.splits_backward:
        return p.splits.in_flight(name, split, stage, grad_acc)
    return 0.0 * (p.splits.rank[split, stage] + grad_acc)


@count
def holds_dense(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where the rank's largest layer is dense (it has no MoE layer)."""
    return _of(p, "holds_dense", split, stage)


@count
def holds_moe(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where the rank holds an MoE layer."""
    return _of(p, "holds_moe", split, stage)
