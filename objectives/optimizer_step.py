"""The optimizer step: one memory-bound pass over the rank's share of states, and what is paid once per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parsolve.functions import Term, term
from parsolve.objectives import parameters
from parsolve.objectives.shard_groups import expert_group_size, group_size
from parsolve.problem import Instance


def _update_time(p: Instance, owned: Any) -> Any:
    """Read gradient, master and states, write master, states and weights, s.

    Adam: 4+4+8 read, 4+8+2 written = 30 bytes a parameter, times the profile's optimizer_traffic.
    """
    traffic = owned * (p.gradient_bytes + 2.0 * p.optimizer_bytes + 2.0) * p.profile.optimizer_traffic
    return traffic / (p.cluster.gpu.memory_bandwidth * p.profile.memory_efficiency)


def sharing(p: Instance, group: Any, zero: Any) -> Any:
    """Ranks that share optimizer states: those that share the weights' states, or fewer where ZeRO-1 is told so."""
    fewer = p.workload.optimizer_shards
    return group if fewer is None else np.where(zero == 1, np.minimum(group, fewer), group)


def _owned(p: Instance, params: Any, group: Any, zero: Any) -> Any:
    return params / np.where(zero >= 1, sharing(p, group, zero), 1)


@term(label="dp_comm", source="profile: shard_member_time")
def shard_broadcast(p: Instance, *, shards: Any, zero: Any) -> Any:
    """Broadcasting updated weights shard by shard, once per step: shard_member_time for every rank that shares, s."""
    return p.profile.shard_member_time * np.where((zero == 1) & (shards > 1), sharing(p, shards, zero), 0)


def _dense(name: str, params: Callable[[Instance, Any], Any], what: str) -> Term:
    def update(p: Instance, *, tp: Any, shards: Any, zero: Any) -> Any:
        return _update_time(p, _owned(p, params(p, tp), group_size(p, shards, zero), zero))

    update.__doc__ = f"Optimizer pass over {what} of one rank, s."
    return term(label="optimizer", source="bytes per parameter of the optimizer", name=f"{name}_update")(update)


dense_layer_update = _dense("dense_layer", parameters.dense_layer_params, "one dense layer")
moe_layer_update = _dense("moe_layer", parameters.moe_layer_dense_params, "one MoE layer without its routed experts")
embedding_update = _dense("embedding", parameters.embedding_params, "the embedding")
head_update = _dense("head", parameters.head_params, "the output layer")
mtp_update = _dense("mtp", parameters.mtp_own_params, "a prediction module beside its layer")


@term(label="optimizer", source="bytes per parameter of the optimizer")
def expert_update(p: Instance, *, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
    """Optimizer pass over one layer's routed experts of one rank, s."""
    return _update_time(p, _owned(p, parameters.expert_layer_params(p, etp, ep), edp, zero))


@term(label="optimizer", source="bytes per parameter of the optimizer")
def grouped_expert_update(p: Instance, *, tp: Any, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
    """Optimizer pass over one layer's routed experts of one rank under shard groups, s."""
    group = expert_group_size(p, tp, ep, etp, edp, zero)
    return _update_time(p, _owned(p, parameters.expert_layer_params(p, etp, ep), group, zero))


@term(label="fixed", source="profile: step_overhead")
def step_overhead(p: Instance) -> Any:
    """Data loading, host synchronisation and logging, once per step, s."""
    return p.profile.step_overhead
