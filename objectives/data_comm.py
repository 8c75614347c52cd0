"""Data-parallel communication: gradients reduced once per step (ZeRO 0, 1), or per microbatch (ZeRO 2, 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parsolve.functions import Term, term
from parsolve.objectives import parameters
from parsolve.objectives.network import pass_time
from parsolve.problem import Instance

WEIGHT_BYTES = 2.0


def _step_bytes(p: Instance, zero: Any) -> Any:
    """Bytes per parameter through one ring pass, once per step.

    ZeRO-0: an all-reduce of gradients (two passes); 1: reduce-scatter of gradients + all-gather of weights;
    2: all-gather of weights; 3: nothing. Source: Rajbhandari et al. 2020, section 7.
    """
    gradients = p.reduction_bytes
    return np.select([zero == 0, zero == 1, zero == 2], [2 * gradients, gradients + WEIGHT_BYTES, WEIGHT_BYTES], 0.0)


def _microbatch_bytes(p: Instance, zero: Any) -> Any:
    """Bytes per parameter through one ring pass, every microbatch.

    ZeRO-2: reduce-scatter of gradients; 3: also an all-gather of weights in forward and in backward.
    """
    gradients = p.reduction_bytes
    return np.select([zero == 2, zero == 3], [gradients, gradients + 2 * WEIGHT_BYTES], 0.0)


def _dense(name: str, params: Callable[[Instance, Any], Any], what: str) -> tuple[Term, Term]:
    """Once-per-step and per-microbatch reduction of a block that is sharded over dp*cp."""

    def per_step(p: Instance, *, tp: Any, shards: Any, zero: Any) -> Any:
        return pass_time(p, shards, tp, params(p, tp) * _step_bytes(p, zero))

    def per_microbatch(p: Instance, *, tp: Any, shards: Any, zero: Any, grad_acc: Any) -> Any:
        return grad_acc * pass_time(p, shards, tp, params(p, tp) * _microbatch_bytes(p, zero))

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


@term(label="dp_comm", source="Rajbhandari et al. 2020 (ZeRO), section 7")
def expert_reduction(p: Instance, *, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
    """Data-parallel traffic of one layer's routed experts once per step over their edp ranks, s."""
    return pass_time(p, edp, etp * ep, parameters.expert_layer_params(p, etp, ep) * _step_bytes(p, zero))


@term(label="gather_comm", source="Rajbhandari et al. 2020 (ZeRO), section 7")
def expert_gather(p: Instance, *, ep: Any, etp: Any, edp: Any, zero: Any, grad_acc: Any) -> Any:
    """Data-parallel traffic of one layer's routed experts of all microbatches (ZeRO-2 and 3), s."""
    payload = parameters.expert_layer_params(p, etp, ep) * _microbatch_bytes(p, zero)
    return grad_acc * pass_time(p, edp, etp * ep, payload)


@term(label="dp_comm", source="tied embeddings, Narayanan et al. 2021")
def tied_embedding_reduction(p: Instance, *, tp: Any) -> Any:
    """All-reduce of a tied embedding's gradient between the first and the last stage, once per step, s."""
    payload = 2.0 * p.reduction_bytes * parameters.padded_vocab(p, tp) * p.model.hidden_size / tp
    rate = p.cluster.nic_bandwidth_per_gpu * p.profile.nic_efficiency
    if p.world <= p.domain:
        rate = p.cluster.fast_link.bandwidth * p.profile.fast_link_efficiency
    return payload / 2 / rate if p.model.tied_embeddings else 0.0 * payload
