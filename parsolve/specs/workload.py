"""What is trained and how it is launched: batch, sequence, precision, optimizer, framework."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from parsolve.specs.base import Bytes, Count, Spec

Framework = Literal["megatron", "deepspeed", "torchtitan", "accelerate", "nemo", "generic"]
MEGATRON_LIKE = ("megatron", "nemo")
"""Frameworks on Megatron-Core: one set of rules, two spellings."""
Precision = Literal["bf16", "fp16", "fp8"]
Optimizer = Literal["adam", "sgd"]
Schedule = Literal["1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev"]
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")
"""Schedules whose backward pass is two: for the gradients of inputs, and for those of weights."""
FOLDED = ("zbv", "dualpipev")
"""Schedules that place a rank's stages in a V: odd chunks go from the last rank back to the first."""
Quantized = Literal["weights", "gradients", "both"]
AttentionKernel = Literal["flash2", "flash1", "fused_softmax", "unfused"]


class Recompute(IntEnum):
    """Activation recomputation: nothing, the framework's selective default (core attention), whole layers, or less.

    BLOCK: whole layers, but only the first few of every (virtual) pipeline chunk; ``Config.recompute_layers`` of them.
    LIGHT: Megatron-Core's selective recomputation of what is cheap to have again: norms of their own, the activation of
    routed experts, and latent attention's projections up to the heads.
    """

    NONE = 0
    SELECTIVE = 1
    FULL = 2
    BLOCK = 3
    LIGHT = 4

    @property
    def text(self) -> str:
        """As it is written in options and results."""
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        """The text in messages; with a format of numbers, the number."""
        return format(int(self), spec) if spec else self.text


class Workload(Spec):
    """The convergence inputs (batch, sequence, precision) and what the launcher may use.

    Exactly one of ``gbs`` (sequences) and ``gbs_tokens`` (tokens) is given. A token target is met by the smallest
    reachable batch at or above it; ``gbs_tolerance`` (a fraction) allows any batch within the band around the target.
    ``sequence_parallel`` None means the framework's default. ``memory_reserve`` is taken off every GPU.
    ``attention_kernel`` None means fused attention where the GPU has it, else a fused softmax. ``fused_norm`` and
    ``overlap`` say whether norms are one kernel and whether communication may run beside compute;
    ``blocking_launches`` is CUDA_LAUNCH_BLOCKING=1. ``gradient_bytes`` is what the stack keeps and reduces per
    gradient element; None: the profile's figures. ``parallel_loss`` says whether logits stay divided over the
    tensor-parallel ranks in the loss; else every rank holds those of the whole vocabulary.
    ``sliced_transfers`` says that pipeline stages pass a 1/tp slice of what all tensor-parallel ranks hold and gather
    it again, as Megatron-LM did before sequence parallelism; DeepSpeed does in any case.
    ``optimizer_shards`` is the number of data-parallel ranks that share optimizer states under ZeRO-1; None: all.
    ``shard_group`` is the number of neighbouring dp*cp ranks that share one sharded copy under ZeRO 1 to 3, with copies
    across the groups (hybrid sharding); None: all of them. Under DeepSpeed it is ZeRO++'s hpZ.
    ``zero_quantized`` sends ZeRO-3's weights in 8 and its gradients in 4 bits (DeepSpeed's ZeRO++), which rounds them.
    ``schedule`` is the pipeline's: 1F1B (interleaved with virtual stages); GPipe, all forward passes first; or one that
    makes the gradients of inputs first and those of weights later, interleaved (zero-bubble), or with two stages a rank
    placed in a V (zbv, dualpipev).
    ``mtp_layers`` is the number of multi-token-prediction modules that are trained; None: as many as the model has
    where the launcher trains them (Megatron-Core), else none.
    ``train_tokens`` is the token budget of the whole run, which sets the number of steps in launch lines.
    """

    seq_len: Count
    gbs: Annotated[Count, Field(le=10**8)] | None = None
    gbs_tokens: Count | None = None
    gbs_tolerance: float | None = Field(default=None, ge=0, lt=1)
    precision: Precision = "bf16"
    optimizer: Optimizer = "adam"
    framework: Framework = "megatron"
    framework_version: str | None = None
    recompute: tuple[Recompute, ...] = tuple(Recompute)
    sequence_parallel: bool | None = None
    memory_reserve: Bytes = 0
    attention_kernel: AttentionKernel | None = None
    fused_norm: bool = True
    overlap: bool = True
    blocking_launches: bool = False
    gradient_bytes: Literal[2, 4] | None = None
    parallel_loss: bool = True
    sliced_transfers: bool = False
    optimizer_shards: Count | None = None
    shard_group: Annotated[Count, Field(ge=2)] | None = None
    zero_quantized: Quantized | None = None
    mtp_layers: Annotated[int, Field(ge=0, le=16)] | None = None
    train_tokens: Count | None = None
    schedule: Schedule = "1f1b"

    @model_validator(mode="after")
    def _one_batch(self) -> Workload:
        if (self.gbs is None) == (self.gbs_tokens is None):
            raise ValueError("give exactly one of gbs (sequences) and gbs_tokens (tokens)")
        if not self.recompute:
            raise ValueError("recompute must allow at least one of none, selective, light, block, full")
        if self.zero_quantized is not None and self.framework != "deepspeed":
            raise ValueError(
                f"zero_quantized is DeepSpeed's (ZeRO++): {self.framework} sends ZeRO's traffic in 16 bits"
            )
        return self

    @property
    def splits_backward(self) -> bool:
        """The pipeline's backward pass is two, for the gradients of inputs and of weights."""
        return self.schedule in SPLIT_BACKWARD

    def quantizes(self, what: Literal["weights", "gradients"]) -> bool:
        """Whether ZeRO-3 is to send its weights, or its gradients, quantised."""
        return self.zero_quantized in (what, "both")
