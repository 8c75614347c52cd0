"""What one layer costs a microbatch, as a list of terms, and what it costs to run it forward once more.

Under recompute=block a layer's own terms are those without recomputation. The layers that are recomputed pay the terms
below in addition: exactly what the same terms cost more when all layers are recomputed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import Term, term
from parsolve.objectives import compute, context_comm, expert_comm, gradient_accumulation, launch
from parsolve.objectives import tensor_comm as tensor
from parsolve.problem import Instance
from parsolve.specs import Recompute

ATTENTION_TERMS = (
    compute.attention_projections,
    compute.attention_core,
    compute.attention_elementwise,
    tensor.attention_tensor_comm,
    context_comm.context_comm,
)
DENSE_TERMS = (
    compute.dense_mlp,
    tensor.mlp_tensor_comm,
    launch.dense_launch,
    gradient_accumulation.dense_layer_accumulation,
)
MOE_TERMS = (
    compute.shared_experts,
    compute.routed_experts,
    expert_comm.expert_comm,
    launch.moe_launch,
    gradient_accumulation.moe_layer_accumulation,
    gradient_accumulation.expert_accumulation,
)
DENSE_PIPELINED = (launch.dense_pipelined_launch,)
MOE_PIPELINED = (launch.moe_pipelined_launch,)
"""Host time that only pipelined runs pay; on the way of the first microbatch as well."""
HIDING_TERMS = (compute.attention_projections, compute.attention_core)
DENSE_HIDING_TERMS = (compute.dense_mlp,)
MOE_HIDING_TERMS = (compute.shared_experts, compute.routed_experts)
"""Compute under which data-parallel traffic can hide: of any layer, of a dense and of an MoE layer."""


def moe_terms(p: Instance) -> tuple[Term, ...]:
    """MoE layers with shared experts also pay the tensor-parallel traffic of an MLP."""
    shared = p.model.moe is not None and p.model.moe.shared_ffn_size > 0
    return (*MOE_TERMS, tensor.mlp_tensor_comm) if shared else MOE_TERMS


def _again(p: Instance, terms: tuple[Term, ...], **values: Any) -> Any:
    """What the terms cost more where the layer is recomputed than where it is not."""
    again: Any = 0.0
    for t in terms:
        if "recompute" in t.axes:
            full, none = (t(p, {**values, "recompute": np.asarray(int(r))}) for r in (Recompute.FULL, Recompute.NONE))
            again = again + (full - none)
    return np.maximum(0.0, again)


BLOCK = "Megatron-Core recompute.py: the first layers of a chunk run forward again in its backward pass"


@term(label="recomputation", source=BLOCK)
def dense_recomputation(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """One more forward pass of a dense layer and microbatch, communication included, s (recompute=block)."""
    return _again(p, (*ATTENTION_TERMS, *DENSE_TERMS), tp=tp, cp=cp, mbs=mbs)


@term(label="recomputation", source=BLOCK)
def moe_recomputation(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any) -> Any:
    """One more forward pass of an MoE layer and microbatch, communication included, s (recompute=block)."""
    return _again(p, (*ATTENTION_TERMS, *moe_terms(p)), tp=tp, cp=cp, ep=ep, etp=etp, mbs=mbs)


@term(label="recomputation", source=BLOCK)
def dense_pipelined_recomputation(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """The same in a pipeline, with the host time that only pipelined runs pay, s."""
    return _again(p, (*ATTENTION_TERMS, *DENSE_TERMS, *DENSE_PIPELINED), tp=tp, cp=cp, mbs=mbs)


@term(label="recomputation", source=BLOCK)
def moe_pipelined_recomputation(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any) -> Any:
    """The same in a pipeline, with the host time that only pipelined runs pay, s."""
    return _again(p, (*ATTENTION_TERMS, *moe_terms(p), *MOE_PIPELINED), tp=tp, cp=cp, ep=ep, etp=etp, mbs=mbs)


@term(label="recomputation", source=BLOCK)
def dense_recomputation_hiding(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Of it the compute under which data-parallel traffic can hide, s."""
    return _again(p, (*HIDING_TERMS, *DENSE_HIDING_TERMS), tp=tp, cp=cp, mbs=mbs)


@term(label="recomputation", source=BLOCK)
def moe_recomputation_hiding(p: Instance, *, tp: Any, cp: Any, ep: Any, etp: Any, mbs: Any) -> Any:
    """Of it the compute under which data-parallel traffic can hide, s."""
    return _again(p, (*HIDING_TERMS, *MOE_HIDING_TERMS), tp=tp, cp=cp, ep=ep, etp=etp, mbs=mbs)
