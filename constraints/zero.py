"""ZeRO stages and what they exclude."""

from __future__ import annotations

from typing import Any

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


RULES = (zero_stage, zero_needs_shards, zero_with_pipeline, zero_with_experts, fsdp_with_pipeline, fsdp_since)
