"""How many ranks share one sharded copy of the states: all that hold the same weights, or the workload's shard group.

With ``shard_group`` = N the dp*cp ranks that hold the same dense weights form groups of N neighbours (hybrid sharding):
states are divided inside a group, and the dp*cp/N groups hold copies of each other. Experts have as many copies.
DeepSpeed's groups (ZeRO++ hpZ) hold a second copy of the weights alone, for the backward pass; its states stay divided
over all ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.problem import Instance


def group_size(p: Instance, shards: Any, zero: Any) -> Any:
    """Ranks that share the states of dense weights: min(N, dp*cp) from ZeRO-1 on, else dp*cp that only reduce."""
    if p.workload.shard_group is None or second_copy(p):
        return shards
    return np.where(np.asarray(zero) >= 1, np.minimum(shards, p.workload.shard_group), shards)


def second_copy(p: Instance) -> bool:
    """Groups hold a second copy of the weights and nothing else. Source: ZeRO++ (Wang et al. 2023), hpZ."""
    return p.workload.shard_group is not None and p.framework == "deepspeed"


def expert_group_size(p: Instance, tp: Any, ep: Any, etp: Any, edp: Any, zero: Any) -> Any:
    """Ranks that share the states of routed experts: edp over the number of groups, N*tp/(ep*etp).

    edp*ep*etp = dp*cp*tp, so that edp / (dp*cp/N) = N*tp/(ep*etp). Source: Megatron-LM parallel_state.py,
    intra_partial_expert_data_parallel_size; torchtitan parallel_dims.py, efsdp.
    """
    if p.workload.shard_group is None or second_copy(p):
        return edp
    group = p.workload.shard_group
    return np.where(np.asarray(zero) >= 1, np.clip(group * tp / (np.asarray(ep) * etp), 1, edp), edp)
