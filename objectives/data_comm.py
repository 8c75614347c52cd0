"""Data-parallel communication: gradients reduced once per step (ZeRO 0, 1), or per microbatch (ZeRO 2, 3).

Under shard groups the same bytes pass inside a group, and what each rank keeps of the gradients is reduced over the
groups as often: an all-reduce of a 1/N share. DeepSpeed gathers over all ranks in the forward pass and inside a group
in the backward pass. ZeRO++'s quantised traffic is in ``quantized_comm``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parsolve.functions import Term, term
from parsolve.objectives import parameters
from parsolve.objectives.network import pass_time
from parsolve.objectives.quantized_comm import WEIGHT_BYTES, gathered_bytes, quantized_time, quantizes
from parsolve.objectives.shard_groups import expert_group_size, group_size, second_copy
from parsolve.problem import Instance


def _step_bytes(p: Instance, zero: Any) -> Any:
    """Bytes per parameter through one ring pass, once per step.

    ZeRO-0: an all-reduce of gradients (two passes); 1: reduce-scatter of gradients + all-gather of weights;
    2: all-gather of weights; 3: nothing. Source: Rajbhandari et al. 2020, section 7.
    """
    gradients = p.reduction_bytes
    return np.select([zero == 0, zero == 1, zero == 2], [2 * gradients, gradients + WEIGHT_BYTES, WEIGHT_BYTES], 0.0)


def _microbatch_bytes(p: Instance, zero: Any) -> Any:
    """Bytes per parameter through one ring pass, every microbatch.

    ZeRO-2: reduce-scatter of gradients; 3: also an all-gather of weights in forward and in backward. Quantised
    gradients go another way than this ring.
    """
    gradients = p.reduction_bytes
    of_3 = 0.0 if quantizes(p, "gradients") else gradients
    return np.select([zero == 2, zero == 3], [gradients, of_3 + 2 * gathered_bytes(p)], 0.0)


def _across_bytes(p: Instance, zero: Any, per_microbatch: bool) -> Any:
    """Bytes per parameter of a rank's share through one ring pass over the groups: an all-reduce of gradients.

    Once per step under ZeRO-1, every microbatch under 2 and 3. Source: PyTorch fully_shard, hybrid sharding.
    """
    here = (zero >= 2) if per_microbatch else (zero == 1)
    return np.where(here, 2.0 * p.reduction_bytes, 0.0)


def _sharded_time(
    p: Instance, ranks: Any, group: Any, stride: Any, params: Any, zero: Any, per_microbatch: bool = False
) -> Any:
    """One reduction of a block held by ``ranks`` ranks in groups of ``group`` neighbours ``stride`` apart, s."""
    inside = _microbatch_bytes(p, zero) if per_microbatch else _step_bytes(p, zero)
    if p.workload.shard_group is None:
        return pass_time(p, group, stride, params * inside)
    if second_copy(p):
        held = (zero == 3) & (np.asarray(ranks) > p.workload.shard_group)
        near = np.where(held & per_microbatch, gathered_bytes(p), 0.0)  # gathered again from the copy in the group
        copy = pass_time(p, np.minimum(ranks, p.workload.shard_group), stride, params * near)
        return pass_time(p, ranks, stride, params * (inside - near)) + np.where(near > 0, copy, 0.0)
    across = _across_bytes(p, zero, per_microbatch)
    copies = pass_time(p, ranks / group, stride * group, params / group * across)
    return pass_time(p, group, stride, params * inside) + np.where(across > 0, copies, 0.0)


def _dense(name: str, params: Callable[[Instance, Any], Any], what: str) -> tuple[Term, Term]:
    """Once-per-step and per-microbatch reduction of a block that is sharded over dp*cp."""

    def per_step(p: Instance, *, tp: Any, shards: Any, zero: Any) -> Any:
        return _sharded_time(p, shards, group_size(p, shards, zero), tp, params(p, tp), zero)

    def per_microbatch(p: Instance, *, tp: Any, shards: Any, zero: Any, grad_acc: Any) -> Any:
        held = params(p, tp)
        rings = _sharded_time(p, shards, group_size(p, shards, zero), tp, held, zero, True)
        return grad_acc * (rings + quantized_time(p, shards, held, zero))

    per_step.__doc__ = f"Data-parallel traffic of {what} once per step over dp*cp ranks, s."
    per_microbatch.__doc__ = f"Data-parallel traffic of {what} of all microbatches (ZeRO-2 and 3), s."
    source = "Rajbhandari et al. 2020 (ZeRO), section 7"
    return (
        term(label="dp_comm", source=source, name=f"{name}_reduction")(per_step),
        term(label="gather_comm", source=source, name=f"{name}_gather")(per_microbatch),
    )


dense_layer_reduction, dense_layer_gather = _dense("dense_layer", parameters.dense_layer_params, "one dense layer")
moe_layer_reduction, moe_layer_gather = _dense(
    "moe_layer", parameters.moe_layer_dense_params, "one MoE layer without its routed experts"
)
embedding_reduction, embedding_gather = _dense("embedding", parameters.embedding_params, "the embedding")
head_reduction, head_gather = _dense("head", parameters.head_params, "the output layer")
mtp_reduction, mtp_gather = _dense("mtp", parameters.mtp_own_params, "a prediction module beside its layer")


@term(label="dp_comm", source="Rajbhandari et al. 2020 (ZeRO), section 7")
def expert_reduction(p: Instance, *, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
    """Data-parallel traffic of one layer's routed experts once per step over their edp ranks, s."""
    return _sharded_time(p, edp, edp, etp * ep, parameters.expert_layer_params(p, etp, ep), zero)


@term(label="gather_comm", source="Rajbhandari et al. 2020 (ZeRO), section 7")
def expert_gather(p: Instance, *, ep: Any, etp: Any, edp: Any, zero: Any, grad_acc: Any) -> Any:
    """Data-parallel traffic of one layer's routed experts of all microbatches (ZeRO-2 and 3), s."""
    return grad_acc * _sharded_time(p, edp, edp, etp * ep, parameters.expert_layer_params(p, etp, ep), zero, True)


@term(label="dp_comm", source="Rajbhandari et al. 2020 (ZeRO), section 7")
def grouped_expert_reduction(p: Instance, *, tp: Any, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
    """Data-parallel traffic of one layer's routed experts once per step under shard groups, s."""
    group = expert_group_size(p, tp, ep, etp, edp, zero)
    return _sharded_time(p, edp, group, etp * ep, parameters.expert_layer_params(p, etp, ep), zero)


@term(label="gather_comm", source="Rajbhandari et al. 2020 (ZeRO), section 7")
def grouped_expert_gather(p: Instance, *, tp: Any, ep: Any, etp: Any, edp: Any, zero: Any, grad_acc: Any) -> Any:
    """Data-parallel traffic of one layer's routed experts of all microbatches under shard groups, s."""
    group = expert_group_size(p, tp, ep, etp, edp, zero)
    return grad_acc * _sharded_time(p, edp, group, etp * ep, parameters.expert_layer_params(p, etp, ep), zero, True)


@term(label="dp_comm", source="Narayanan et al. 2021; Megatron-Core finalize_model_grads.py")
def tied_embedding_reduction(p: Instance, *, tp: Any) -> Any:
    """All-reduce of an embedding's gradient between the first and the last stage, once per step, s.

    Tied to the output layer, or copied for multi-token prediction, whichever; both are one all-reduce.
    """
    payload = 2.0 * p.reduction_bytes * parameters.padded_vocab(p, tp) * p.model.embedding_width / tp
    rate = p.cluster.nic_bandwidth_per_gpu * p.profile.nic_efficiency
    if p.world <= p.domain:
        rate = p.cluster.fast_link.bandwidth * p.profile.fast_link_efficiency
    return payload / 2 / rate if p.model.tied_embeddings or p.mtp_layers else 0.0 * payload
