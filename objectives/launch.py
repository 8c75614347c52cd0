"""Launching kernels: the host needs time for each, which shows where layers are too small to keep the GPU busy."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import Term, term
from parsolve.objectives import compute, context_comm, expert_comm, tensor_comm
from parsolve.problem import Instance
from parsolve.specs import Recompute

KERNELS = {"flash2": 0.0, "flash1": 0.0, "fused_softmax": 6.0, "unfused": 12.0}
"""Kernels that attention adds forward to BASE_KERNELS."""
BASE_KERNELS, UNFUSED_NORM_KERNELS, EXPERT_KERNELS = 18.0, 10.0, 30.0
"""Forward kernels of a layer with fused attention; of two norms that are not one kernel; of routing, permuting and
exchanging tokens. Counted by hand. Tensor parallelism adds none: the published floors of small layers do not depend on
it up to tp=4."""


def _kernels(p: Instance, recompute: Any, experts: float) -> Any:
    """Kernel launches of a layer and microbatch: backward launches twice the forward's."""
    forward = BASE_KERNELS + KERNELS[p.attention_kernel] + experts
    forward = forward + (0.0 if p.workload.fused_norm else UNFUSED_NORM_KERNELS)
    return forward * (3.0 + (recompute == Recompute.FULL))


def _wait(p: Instance, host: Any, device: Any) -> Any:
    """What the host adds to the GPU's time: it runs ahead unless every launch blocks."""
    return host if p.workload.blocking_launches else np.maximum(0.0, host - device)


DENSE: tuple[Term, ...] = (
    compute.attention_projections,
    compute.attention_core,
    compute.attention_elementwise,
    tensor_comm.attention_tensor_comm,
    context_comm.context_comm,
    compute.dense_mlp,
    tensor_comm.mlp_tensor_comm,
)
MOE: tuple[Term, ...] = (*DENSE[:5], compute.shared_experts, compute.routed_experts, expert_comm.expert_comm)


def _dense_device(p: Instance, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    values = {"tp": tp, "cp": cp, "mbs": mbs, "recompute": recompute}
    return sum(t(p, values) for t in DENSE)


def _moe_device(p: Instance, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    values = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "mbs": mbs, "recompute": recompute}
    return sum(t(p, values) for t in MOE)


@term(label="launch", source="profile: launch_time; kernels counted by hand")
def dense_launch(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Time by which launching a dense layer's kernels exceeds their run time, per microbatch, s.

    max(0, kernels * launch_time - compute and communication of the layer); all of it with blocking launches.
    """
    host = _kernels(p, recompute, 0.0) * p.profile.launch_time
    return _wait(p, host, _dense_device(p, tp, cp, mbs, recompute))


@term(label="launch", source="profile: launch_time; kernels counted by hand")
def moe_launch(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Time by which launching an MoE layer's kernels exceeds their run time, per microbatch, s."""
    host = _kernels(p, recompute, EXPERT_KERNELS) * p.profile.launch_time
    return _wait(p, host, _moe_device(p, tp, cp, ep, etp, mbs, recompute))


def _pipelined(p: Instance, tp: Any, host: Any, device: Any) -> Any:
    """What the host's per-member work adds to max(host, device) of a layer."""
    members = p.profile.pipelined_member_time * tp * (tp > 1)
    return np.maximum(host + members, device) - np.maximum(host, device)


@term(label="launch", source="profile: pipelined_member_time; zero for most stacks")
def dense_pipelined_launch(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Host time of a dense layer that only pipelined runs with tensor parallelism pay, per microbatch, s.

    max(host + tp * pipelined_member_time, device) - max(host, device).
    """
    host = _kernels(p, recompute, 0.0) * p.profile.launch_time
    return _pipelined(p, tp, host, _dense_device(p, tp, cp, mbs, recompute))


@term(label="launch", source="profile: pipelined_member_time; zero for most stacks")
def moe_pipelined_launch(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any, recompute: Any) -> Any:
    """Host time of an MoE layer that only pipelined runs with tensor parallelism pay, per microbatch, s."""
    host = _kernels(p, recompute, EXPERT_KERNELS) * p.profile.launch_time
    return _pipelined(p, tp, host, _moe_device(p, tp, cp, ep, etp, mbs, recompute))
