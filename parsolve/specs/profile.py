"""The efficiency constants of a software stack on a hardware family: what share of the rates real training reaches."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from parsolve.specs.base import Bytes, Seconds, Spec


def _share(meaning: str, low: float = 0.0) -> Any:
    """A constant from ``low`` (excluded when 0) to 1."""
    return Field(gt=0, ge=low, le=1, description=meaning)


class Profile(Spec):
    """Each constant has a physical meaning, a unit, a range and, in ``sources``, where its value comes from.

    A file may name a ``base`` beside these keys: a shipped profile whose constants, with their origin, it takes over
    and replaces in part.
    """

    name: str
    # ---- kernels
    gemm_efficiency: float = _share("share of the dense peak that a large 16-bit matrix product reaches")
    low_precision_gemm_efficiency: float = _share("the same for fp8 products, of the fp8 peak")
    gemm_half_tiles: float = Field(
        ge=0, description="output tiles of 128 x 128 at which sharing them among the processors halves a product's rate"
    )
    gemm_half_depth: float = Field(ge=0, description="inner size at which it alone halves a product's rate")
    grouped_gemm_efficiency: float = _share("expert products relative to a plain product of the same size")
    attention_efficiency: float = _share("share of the 16-bit peak in fused attention, forward")
    attention_backward_efficiency: float = _share("share of the 16-bit peak in fused attention, backward")
    memory_efficiency: float = _share("share of the HBM rate in memory-bound kernels")
    elementwise_traffic: float = Field(
        gt=0, le=10, description="bytes moved by element-wise operations relative to fully fused kernels"
    )
    loss_traffic: float = Field(gt=0, le=200, description="bytes moved per logit in the loss, forward and backward")
    accumulation_bytes: float = Field(
        ge=0,
        le=20,
        description="bytes moved per parameter and microbatch to add gradients to their sum or to copy shards",
    )
    optimizer_traffic: float = Field(
        gt=0, le=20, description="bytes moved by the optimizer step relative to a fused update"
    )
    kernel_overhead: Seconds = Field(description="idle time of the GPU between two kernels")
    launch_time: Seconds = Field(description="host time to launch one kernel: a floor under small layers")
    # ---- network
    fast_link_efficiency: float = _share("share of the fast link's rate in large collectives")
    nic_efficiency: float = _share("share of the NIC's rate in large collectives")
    p2p_efficiency: float = _share("share of the NIC's rate between pipeline stages")
    collective_overhead: Seconds = Field(description="start-up of one collective beside the links' latency")
    p2p_overhead: Seconds = Field(description="start-up and waiting of one exchange between stages")
    pipelined_member_time: Seconds = Field(
        description="host time that pipelining adds to a layer for every tensor-parallel member (stacks that handle "
        "each member's tensors one by one)"
    )
    shard_member_time: Seconds = Field(
        description="time per step for every rank that shares optimizer states (stacks that broadcast shard by shard)"
    )
    expert_imbalance: float = Field(ge=1, description="load of the fullest expert rank over the mean")
    # ---- overlap
    tp_overlap: float = Field(ge=0, le=1, description="share of tensor-parallel traffic hidden behind compute")
    cp_overlap: float = Field(ge=0, le=1, description="share of attention under which context-parallel traffic hides")
    ep_overlap: float = Field(ge=0, le=1, description="share of expert-parallel traffic hidden behind compute")
    p2p_overlap: float = Field(ge=0, le=1, description="share of stage exchanges hidden in interleaved schedules")
    dp_overlap: float = Field(ge=0, le=1, description="share of a microbatch's compute under which reductions hide")
    gather_overlap: float = Field(ge=0, le=1, description="share of compute under which per-microbatch gathers hide")
    step_overhead: Seconds = Field(description="paid once per step: data, host synchronisation, logging")
    # ---- memory
    gradient_bytes: float | None = Field(
        default=None, gt=0, le=8, description="bytes per gradient element held; none: the framework's habit"
    )
    reduction_bytes: float | None = Field(
        default=None,
        gt=0,
        le=8,
        description="bytes per gradient element sent in a reduction; none: as many as are held",
    )
    logits_memory: float = Field(gt=0, le=40, description="bytes held per logit at the peak")
    activation_memory: float = Field(
        gt=0, le=3, description="activations held relative to what fused kernels need to keep"
    )
    outside_bytes: Bytes = Field(description="memory outside the tensors: context, NCCL, workspaces")
    fragmentation: float = Field(ge=0, lt=1, description="the allocator's loss as a share of the activations")
    sources: dict[str, str] = Field(default_factory=dict)


CONSTANTS = tuple(name for name in Profile.model_fields if name not in ("name", "sources"))
"""Names of the constants in the order of the file."""
