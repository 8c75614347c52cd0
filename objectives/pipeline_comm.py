"""Pipeline communication: activations and their gradients between neighbouring stages."""

from __future__ import annotations

from typing import Any

from parsolve.functions import term
from parsolve.objectives.compute import token_share, tokens
from parsolve.objectives.network import pass_time
from parsolve.problem import Instance


def _transfer(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """One activation sent to the next stage and one gradient received, s. The slowest boundary crosses domains.

    Each rank sends its tokens x hidden at 2 bytes: its share with sequence parallelism. DeepSpeed's pipeline, and
    Megatron-LM's before sequence parallelism (Narayanan et al. 2021, section 4.1), send a 1/tp slice in any case and
    gather it again over the fast link.
    """
    cluster, profile = p.cluster, p.profile
    whole = 2.0 * tokens(p, cp, mbs) * p.model.hidden_size
    sliced = (p.framework == "deepspeed" or p.workload.sliced_transfers) and not p.sequence_parallel
    payload = whole * (1.0 / tp if sliced else token_share(p, tp))
    gather = pass_time(p, tp, 1, whole) if sliced else 0.0
    if p.world <= p.domain:
        rate, latency = cluster.fast_link.bandwidth * profile.fast_link_efficiency, cluster.fast_link.latency
    else:
        rate, latency = cluster.nic_bandwidth_per_gpu * profile.p2p_efficiency, cluster.nic.latency
    return 2.0 * (payload / rate + latency + profile.p2p_overhead + gather)


@term(label="pp_comm", source="Narayanan et al. 2021, section 3.2")
def stage_transfer(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Sending to and receiving from the neighbour stages, per microbatch, in line in plain 1F1B, s."""
    return _transfer(p, tp, cp, mbs)


@term(label="pp_comm", source="Narayanan et al. 2021, section 3.2")
def overlapped_stage_transfer(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """The same per chunk in the interleaved schedule, where compute hides most of it, s."""
    return _transfer(p, tp, cp, mbs) * (1.0 - p.profile.p2p_overlap * p.overlap)


@term(label="pp_comm", source="as overlapped_stage_transfer")
def overlapped_stage_transfer_hidden(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """What compute hides of it, s."""
    return _transfer(p, tp, cp, mbs) * p.profile.p2p_overlap * p.overlap
