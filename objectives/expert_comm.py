"""Expert-parallel communication: tokens are dispatched to the ranks that hold their experts and combined again."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import term
from parsolve.objectives.compute import tokens
from parsolve.objectives.network import all_to_all_time, pass_time
from parsolve.problem import Instance
from parsolve.specs import Recompute


@term(label="ep_comm", source="Lepikhin et al. 2020 (GShard); Megatron-Core alltoall dispatcher")
def expert_comm(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Exposed dispatch and combine of one MoE layer and microbatch, s.

    Each rank sends (tokens/tp)*K*hidden*2 bytes out and takes as many back, forward and backward; the fullest rank
    sets the pace. With etp > 1 an all-gather and a reduce-scatter of the same tokens inside the expert-tp group.
    """
    moe = p.model.moe
    if moe is None:
        return np.zeros(np.broadcast(tp, cp, ep, etp, mbs, recompute).shape)
    sent = 2.0 * tokens(p, cp, mbs) / tp * moe.top_k * p.model.hidden_size * p.profile.expert_imbalance
    exchange = all_to_all_time(p, ep, etp, sent) + pass_time(p, etp, 1, sent * etp)
    return exchange * (4.0 + 2.0 * (recompute == Recompute.FULL)) * (1.0 - p.profile.ep_overlap * p.overlap)
