"""Pipeline communication: activations and their gradients between neighbouring stages."""

from __future__ import annotations

from typing import Any

from parsolve.functions import term
from parsolve.objectives.compute import token_share, tokens
from parsolve.objectives.network import pass_time
from parsolve.problem import Instance


def _payload(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """What a rank sends to the next stage, or back, bytes: its tokens x hidden at 2 bytes.

    Its share with sequence parallelism. DeepSpeed's pipeline, and Megatron-LM's before sequence parallelism (Narayanan
    et al. 2021, section 4.1), send a 1/tp slice in any case and gather it again over the fast link.
    """
    whole = 2.0 * tokens(p, cp, mbs) * p.model.hidden_size
    return whole * (1.0 / tp if _sliced(p) else token_share(p, tp))


def _sliced(p: Instance) -> bool:
    return (p.framework == "deepspeed" or p.workload.sliced_transfers) and not p.sequence_parallel


def _link(p: Instance) -> tuple[float, float]:
    """Rate, bytes/s, and time of an empty message, s, between two stages. The slowest boundary crosses domains."""
    cluster, profile = p.cluster, p.profile
    if p.world <= p.domain:
        return (
            cluster.fast_link.bandwidth * profile.fast_link_efficiency,
            cluster.fast_link.latency + profile.p2p_overhead,
        )
    return cluster.nic_bandwidth_per_gpu * profile.p2p_efficiency, cluster.nic.latency + profile.p2p_overhead


def _transfer(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """One activation sent to the next stage and one gradient received, s."""
    rate, empty = _link(p)
    gather = pass_time(p, tp, 1, 2.0 * tokens(p, cp, mbs) * p.model.hidden_size) if _sliced(p) else 0.0
    return 2.0 * (_payload(p, tp, cp, mbs) / rate + empty + gather)


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


STANDALONE = "Megatron-Core p2p_communication.py, _communicate_shapes: where config.mtp_standalone"


@term(label="pp_comm", source=STANDALONE)
def shape_exchange(p: Instance) -> Any:
    """What precedes every transfer where prediction modules have a stage apart from the output layer, s.

    The ranks tell each other what size is coming, once each way, and wait for the device.
    """
    return 2.0 * _link(p)[1]


@term(label="pp_comm", source="Megatron-Core multi_token_prediction.py: hidden states are sent on one behind the other")
def stage_payload(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """One more hidden state in the messages between two stages, and its gradient, s."""
    return 2.0 * _payload(p, tp, cp, mbs) / _link(p)[0]
