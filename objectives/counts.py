"""How often a per-layer or per-stage quantity is paid on a pipeline rank: functions of the cut and the stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import count
from parsolve.problem import Instance


@count
def dense_layers(p: Instance, *, split: Any, stage: Any) -> Any:
    """Layers with a plain MLP on the rank."""
    return p.splits.dense[split, stage]


@count
def moe_layers(p: Instance, *, split: Any, stage: Any) -> Any:
    """Layers with experts on the rank."""
    return p.splits.moe[split, stage]


@count
def all_layers(p: Instance, *, split: Any, stage: Any) -> Any:
    """All layers on the rank."""
    return p.splits.dense[split, stage] + p.splits.moe[split, stage]


@count
def is_first(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the first rank: it holds the embedding."""
    return p.splits.first[split, stage]


@count
def is_last(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the last rank: it holds the output layer."""
    return p.splits.last[split, stage]


@count
def has_own_head(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the last rank when it keeps an output matrix of its own: untied, or tied with more than one stage."""
    own = (p.splits.pp[split] > 1) | (not p.model.tied_embeddings)
    return p.splits.last[split, stage] * own


@count
def has_shared_head(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on the only rank of a model with tied embeddings."""
    return p.splits.last[split, stage] - has_own_head.compute(p, split=split, stage=stage)


@count
def tied_copy(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where tied embeddings have a second copy on another stage."""
    return (p.splits.pp[split] > 1) * 1 + 0 * p.splits.rank[split, stage]


@count
def dense_layers_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's dense layers: layers of the whole model if every rank were like this one."""
    return p.splits.pp[split] * p.splits.dense[split, stage]


@count
def moe_layers_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's MoE layers."""
    return p.splits.pp[split] * p.splits.moe[split, stage]


@count
def layers_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's layers."""
    return p.splits.pp[split] * (p.splits.dense[split, stage] + p.splits.moe[split, stage])


@count
def dense_layers_of_all_pipelined(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's dense layers where there is more than one stage, else 0."""
    return np.where(p.splits.pp[split] > 1, p.splits.pp[split], 0) * p.splits.dense[split, stage]


@count
def moe_layers_of_all_pipelined(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp times the rank's MoE layers where there is more than one stage, else 0."""
    return np.where(p.splits.pp[split] > 1, p.splits.pp[split], 0) * p.splits.moe[split, stage]


@count
def first_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp on the first rank."""
    return p.splits.pp[split] * p.splits.first[split, stage]


@count
def last_of_all(p: Instance, *, split: Any, stage: Any) -> Any:
    """pp on the last rank."""
    return p.splits.pp[split] * p.splits.last[split, stage]


@count
def dense_layers_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """Dense layers in the first chunks of all earlier ranks: what the first microbatch passes before this rank."""
    return p.splits.dense_ahead[split, stage]


@count
def moe_layers_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """MoE layers in the first chunks of all earlier ranks."""
    return p.splits.moe_ahead[split, stage]


@count
def layers_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """All layers in the first chunks of all earlier ranks."""
    return p.splits.dense_ahead[split, stage] + p.splits.moe_ahead[split, stage]


@count
def embedding_ahead(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 on every rank but the first: the first microbatch passes the embedding before it."""
    return 1 - p.splits.first[split, stage]


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
    return p.splits.rank[split, stage]


def chunks_in_flight(p: Instance, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Forward passes of chunks whose activations a rank holds at its peak.

    1F1B: min(m, p-i). Interleaved with microbatch groups of p: min(m*v, 2*(p-1-i) + (v-1)*p + 1).
    Source: Narayanan et al. 2021, section 2.2; Megatron-Core's schedules.py warm-up count.
    """
    pp, vpp, rank = p.splits.pp[split], p.splits.vpp[split], p.splits.rank[split, stage]
    plain = np.minimum(grad_acc, pp - rank)
    interleaved = np.minimum(grad_acc * vpp, 2 * (pp - 1 - rank) + (vpp - 1) * pp + 1)
    return np.where(vpp > 1, interleaved, plain)


def _layers_in_flight(p: Instance, chunk_layers: Any, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Layer-microbatches in flight: chunks come in rounds of pp microbatches each."""
    pp, vpp = p.splits.pp[split], p.splits.vpp[split]
    chunks = chunks_in_flight(p, split, stage, grad_acc)
    rounds, rest = chunks // (pp * vpp), chunks % (pp * vpp)
    full, part = rest // pp, rest % pp  # of the last round: chunks with all pp microbatches, microbatches of the next
    behind = np.cumsum(chunk_layers, axis=2) - chunk_layers
    whole = chunk_layers.sum(axis=2)[split, stage]
    return rounds * pp * whole + pp * behind[split, stage, full] + part * chunk_layers[split, stage, full]


@count
def dense_layers_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Dense layers times the microbatches whose activations are held for them."""
    return _layers_in_flight(p, p.splits.dense_chunks, split, stage, grad_acc)


@count
def moe_layers_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """MoE layers times the microbatches whose activations are held for them."""
    return _layers_in_flight(p, p.splits.moe_chunks, split, stage, grad_acc)


@count
def embeddings_in_flight(p: Instance, *, split: Any, stage: Any, grad_acc: Any) -> Any:
    """Embedding outputs held on the first rank."""
    pp = p.splits.pp[split]
    return np.minimum(grad_acc, pp) * p.splits.first[split, stage]


@count
def holds_dense(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where the rank's largest layer is dense (it has no MoE layer)."""
    return ((p.splits.moe[split, stage] == 0) & (p.splits.dense[split, stage] > 0)) * 1


@count
def holds_moe(p: Instance, *, split: Any, stage: Any) -> Any:
    """1 where the rank holds an MoE layer."""
    return (p.splits.moe[split, stage] > 0) * 1
