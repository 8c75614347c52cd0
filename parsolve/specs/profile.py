"""The efficiency constants of a software stack: what share of the hardware's rates real training reaches."""

from __future__ import annotations

from pydantic import Field

from parsolve.specs.base import Bytes, Seconds, Spec


class Profile(Spec):
    """Each constant has a physical meaning, a unit and, in ``sources``, where it comes from.

    ``gemm_efficiency`` is the share of the dense peak that a large matrix product reaches; ``gemm_half_rows``,
    ``gemm_half_columns`` and ``gemm_half_depth`` are the sizes (rows = tokens, output width, inner size) at which one
    dimension alone halves it. ``low_precision_gemm_efficiency`` replaces it for fp8. ``attention_efficiency`` and
    ``attention_backward_efficiency`` are shares of the bf16 peak in fused attention. ``memory_efficiency`` is the share
    of HBM bandwidth in memory-bound kernels, ``kernel_overhead`` the time between two kernels.
    ``fast_link_efficiency`` and ``nic_efficiency`` are shares of the link rate in large collectives.
    ``expert_imbalance`` is the load of the fullest expert rank over the mean. ``tp_overlap``, ``cp_overlap``,
    ``ep_overlap``, ``p2p_overlap`` (interleaved schedules), ``dp_overlap`` and ``gather_overlap`` are the shares of
    compute (dp, gather, cp) or of the transfer (tp, ep, p2p) under which that communication hides.
    ``step_overhead`` is paid once per step. ``outside_bytes`` is memory outside the tensors (context, NCCL,
    workspaces); ``fragmentation`` the allocator's loss as a share of the activations.
    """

    name: str
    gemm_efficiency: float = Field(gt=0, le=1)
    low_precision_gemm_efficiency: float = Field(gt=0, le=1)
    gemm_half_rows: float = Field(ge=0)
    gemm_half_columns: float = Field(ge=0)
    gemm_half_depth: float = Field(ge=0)
    grouped_gemm_efficiency: float = Field(gt=0, le=1, description="expert GEMMs, relative to a plain GEMM")
    attention_efficiency: float = Field(gt=0, le=1)
    attention_backward_efficiency: float = Field(gt=0, le=1)
    memory_efficiency: float = Field(gt=0, le=1)
    kernel_overhead: Seconds
    fast_link_efficiency: float = Field(gt=0, le=1)
    nic_efficiency: float = Field(gt=0, le=1)
    expert_imbalance: float = Field(ge=1)
    tp_overlap: float = Field(ge=0, le=1)
    cp_overlap: float = Field(ge=0, le=1)
    ep_overlap: float = Field(ge=0, le=1)
    p2p_overlap: float = Field(ge=0, le=1)
    dp_overlap: float = Field(ge=0, le=1)
    gather_overlap: float = Field(ge=0, le=1)
    step_overhead: Seconds
    outside_bytes: Bytes
    fragmentation: float = Field(ge=0, lt=1)
    sources: dict[str, str] = Field(default_factory=dict)
