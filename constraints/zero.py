"""ZeRO stages and what they exclude."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance
from parsolve.specs.workload import MEGATRON_LIKE


@rule("zero={zero} is not a ZeRO stage; 0, 1, 2 and 3 are")
def zero_stage(p: Instance, *, zero: Any) -> Any:
    """ZeRO has the stages 0 to 3."""
    return (zero >= 0) & (zero <= 3)


@rule("zero={zero} has nothing to shard over (dp*cp = {shards}, edp = {edp}): use zero=0", role="canonical")
def zero_needs_shards(p: Instance, *, zero: Any, shards: Any, edp: Any) -> Any:
    """Without a second rank that holds the same weights every stage is stage 0."""
    return (zero == 0) | (shards > 1) | (edp > 1)


@rule(
    "zero={zero} cannot combine with DeepSpeed's pipeline engine (pp={pp}): use zero=1 or pp=1",
    frameworks=("deepspeed",),
    source="DeepSpeed runtime/pipe/engine.py: ZeRO stage must be < 2",
)
def zero_with_pipeline(p: Instance, *, zero: Any, pp: Any) -> Any:
    """DeepSpeed's pipeline engine works with ZeRO 0 and 1 only."""
    return (zero <= 1) | (pp == 1)


@rule(
    "zero={zero} with native DeepSpeed MoE layers: use zero <= 2",
    frameworks=("deepspeed",),
    source="DeepSpeed runtime/engine.py: native MoE layers do not work with ZeRO-3",
)
def zero_with_experts(p: Instance, *, zero: Any) -> Any:
    """DeepSpeed's own MoE layers exclude ZeRO-3."""
    return (zero <= 2) | (p.model.moe is None)


@rule(
    "zero={zero} is Megatron-FSDP, which this plan does not combine with pp={pp}: use zero <= 1 or pp=1",
    frameworks=MEGATRON_LIKE,
    source="per-microbatch gathers repeat on every stage; Megatron-LM ships FSDP recipes without a pipeline",
)
def fsdp_with_pipeline(p: Instance, *, zero: Any, pp: Any) -> Any:
    """ZeRO-2 and 3 (Megatron-FSDP) are offered without a pipeline."""
    return (zero <= 1) | (pp == 1)


@rule(
    "zero={zero} is Megatron-FSDP, which parsolve spells from Megatron-LM 0.14 on, not for "
    "{p.problem.framework_version}: use zero <= 1",
    frameworks=MEGATRON_LIKE,
    source="Megatron-LM: --use-megatron-fsdp and the fsdp_dtensor checkpoint format exist from 0.14 on",
)
def fsdp_since(p: Instance, *, zero: Any) -> Any:
    """Megatron-FSDP under its present name exists from 0.14 on."""
    return (zero <= 1) | (p.megatron_core >= (0, 14))


@rule(
    "shard groups of {p.workload.shard_group} ranks do not divide the dp*cp = {shards} that hold the same weights",
    needs="shard_group",
    source="Megatron-LM parallel_state.py; torchtitan parallel_dims.py: dp_replicate * dp_shard",
)
def shard_group_divides(p: Instance, *, zero: Any, shards: Any) -> Any:
    """Shard groups are equal; ranks that are fewer than a group are one."""
    group = p.workload.shard_group
    return (np.asarray(zero) == 0) | (np.asarray(shards) <= group) | (shards % group == 0)


@rule(
    "ep*etp = {ep}*{etp} does not divide tp times the shard group of {p.workload.shard_group} = {tp}*"
    "{p.workload.shard_group}: a group would hold a part of the experts",
    needs="shard_group",
    source="Megatron-LM parallel_state.py: expert data parallel % instances; torchtitan parallel_dims.py: efsdp",
)
def shard_group_holds_experts(p: Instance, *, tp: Any, ep: Any, etp: Any, zero: Any, shards: Any) -> Any:
    """Every shard group holds all experts."""
    group = p.workload.shard_group
    idle = (np.asarray(zero) == 0) | (np.asarray(shards) <= group) | (p.model.moe is None)
    return idle | (group * tp % (np.asarray(ep) * etp) == 0)


@rule(
    "zero={zero} over shard groups: Megatron-LM repeats the distributed optimizer, which is zero=1",
    frameworks=MEGATRON_LIKE,
    needs="shard_group",
    source="Megatron-LM arguments.py: --num-distributed-optimizer-instances",
)
def optimizer_instances(p: Instance, *, zero: Any) -> Any:
    """Shard groups in Megatron-LM are instances of the distributed optimizer."""
    return np.asarray(zero) <= 1


@rule(
    "zero={zero}, tp={tp}, cp={cp} with groups of {p.workload.shard_group}: DeepSpeed's (ZeRO++ hpZ) hold a second copy"
    " of ZeRO-3 weights, with tp=cp=1",
    frameworks=("deepspeed",),
    needs="shard_group",
    source="DeepSpeed runtime/zero/config.py: zero_hpz_partition_size; utils/groups.py: groups of neighbouring ranks",
)
def secondary_partition(p: Instance, *, tp: Any, cp: Any, zero: Any) -> Any:
    """hpZ is a part of ZeRO-3 data parallelism."""
    return (np.asarray(zero) == 3) & (tp == 1) & (cp == 1)


@rule(
    "zero={zero}, tp={tp}, cp={cp} with quantised {p.workload.zero_quantized}: ZeRO++ quantises the traffic of ZeRO-3, "
    "with tp=cp=1",
    frameworks=("deepspeed",),
    needs="zero_quantized",
    source="DeepSpeed runtime/zero/stage3.py; comm/coalesced_collectives.py: all_to_all_quant_reduce over all ranks",
)
def quantised_traffic(p: Instance, *, tp: Any, cp: Any, zero: Any) -> Any:
    """Quantised traffic is a part of ZeRO-3 data parallelism."""
    return (np.asarray(zero) == 3) & (tp == 1) & (cp == 1)


RULES = (
    zero_stage,
    zero_needs_shards,
    zero_with_pipeline,
    zero_with_experts,
    fsdp_with_pipeline,
    fsdp_since,
    shard_group_divides,
    shard_group_holds_experts,
    optimizer_instances,
    secondary_partition,
    quantised_traffic,
)
