"""Handing over a microbatch's weight gradients: a memory-bound pass over the rank's parameters, whatever its tokens.

Without shards: the gradients are added to their sum. With sharded weights: weights and gradients are copied out of and
into the communication buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parsolve.functions import Term, term
from parsolve.objectives import parameters
from parsolve.problem import Instance

SOURCE = "profile: accumulation_bytes; gradients read and written once a microbatch"


def _accumulation_time(p: Instance, params: Any) -> Any:
    """accumulation_bytes a parameter through the HBM, s."""
    return params * p.profile.accumulation_bytes / (p.cluster.gpu.memory_bandwidth * p.profile.memory_efficiency)


def _dense(name: str, params: Callable[[Instance, Any], Any], what: str) -> Term:
    def accumulation(p: Instance, *, tp: Any) -> Any:
        return _accumulation_time(p, params(p, tp))

    accumulation.__doc__ = f"Accumulating the gradients of {what} on one rank, per microbatch, s."
    return term(label="accumulation", source=SOURCE, name=f"{name}_accumulation")(accumulation)


dense_layer_accumulation = _dense("dense_layer", parameters.dense_layer_params, "one dense layer")
moe_layer_accumulation = _dense(
    "moe_layer", parameters.moe_layer_dense_params, "one MoE layer without its routed experts"
)
embedding_accumulation = _dense("embedding", parameters.embedding_params, "the embedding")
head_accumulation = _dense("head", parameters.head_params, "the output layer")
mtp_accumulation = _dense("mtp", parameters.mtp_own_params, "a prediction module beside its layer")


@term(label="accumulation", source=SOURCE)
def expert_accumulation(p: Instance, *, ep: Any, etp: Any) -> Any:
    """Accumulating the gradients of one layer's routed experts on one rank, per microbatch, s."""
    return _accumulation_time(p, parameters.expert_layer_params(p, etp, ep))
