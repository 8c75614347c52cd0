"""Context-parallel communication: keys and values pass around a ring, or heads are exchanged all-to-all (Ulysses)."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import term
from parsolve.objectives.compute import attention_core, repeats_attention, tokens
from parsolve.objectives.network import all_to_all_time, pass_time
from parsolve.objectives.parameters import kv_heads_per_rank
from parsolve.problem import Instance


def _traffic(p: Instance, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """All context-parallel transfers of one layer and microbatch, s."""
    model = p.model
    rows = tokens(p, cp, mbs)
    again = repeats_attention(recompute)
    if p.framework == "deepspeed":
        heads = 2 * model.num_heads / tp + 2 * kv_heads_per_rank(p, tp)
        return (2.0 + again) * all_to_all_time(p, cp, tp, 2.0 * rows * heads * model.qk_head_size)
    kv_heads = model.num_heads / tp if model.mla else kv_heads_per_rank(p, tp)
    block = 2.0 * rows * kv_heads * (model.qk_head_size + model.v_head_size)
    # a ring of cp-1 steps moves cp times one block's payload past every rank; backward carries dK, dV as well
    return (3.0 + again) * pass_time(p, cp, tp, block * cp, calls=1.0)


@term(label="cp_comm", source="Liu et al. 2023 (ring attention); Jacobs et al. 2023 (Ulysses, DeepSpeed)")
def context_comm(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Context-parallel traffic of one layer and microbatch that attention does not hide, s.

    Ring (Megatron's p2p): K and V forward, K, V, dK, dV backward, beside the attention of the block before it.
    All-to-all (DeepSpeed Ulysses): q, k, v, o before and after attention, in line.
    """
    traffic = _traffic(p, tp, cp, mbs, recompute)
    if p.framework == "deepspeed":
        return traffic
    attention = attention_core.compute(p, tp=tp, cp=cp, mbs=mbs, recompute=recompute)
    return np.maximum(0.0, traffic - p.profile.cp_overlap * p.overlap * attention)


@term(label="cp_comm", source="as context_comm")
def context_comm_hidden(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """What attention hides of it, s."""
    shown = context_comm.compute(p, tp=tp, cp=cp, mbs=mbs, recompute=recompute)
    return _traffic(p, tp, cp, mbs, recompute) - shown
