"""The global batch: mbs * grad_acc * dp sequences per step."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance


@rule(
    "mbs*grad_acc*dp = {mbs}*{grad_acc}*{dp} is not the global batch of {p.gbs} sequences",
    source="Megatron-LM num_microbatches_calculator.py; DeepSpeed runtime/config.py: train_batch_size",
)
def global_batch(p: Instance, *, mbs: Any, grad_acc: Any, dp: Any) -> Any:
    """Micro-batch size times microbatches times data-parallel ranks is the global batch size."""
    return mbs * grad_acc * dp == p.gbs


@rule(
    "grad_acc={grad_acc} is not the smallest that reaches the token target at mbs*dp = {mbs}*{dp} sequences "
    "(the target is {p.problem.gbs_target[0]} sequences)",
)
def token_target(p: Instance, *, mbs: Any, grad_acc: Any, dp: Any) -> Any:
    """Under a token target without a band every (mbs, dp) takes its smallest batch at or above the target."""
    if p.workload.gbs_tokens is None or p.workload.gbs_tolerance is not None:
        return (mbs > 0) & (grad_acc > 0) & (dp > 0)
    target = p.workload.gbs_tokens / p.seq_len
    return (mbs * grad_acc * dp >= target) & (mbs * (grad_acc - 1) * dp < target)


@rule(
    "the batch of {p.gbs} sequences is outside {p.problem.gbs_target[0]} to {p.problem.gbs_target[1]}",
)
def batch_range(p: Instance) -> Any:
    """The global batch lies within the tolerance band, or at or above the token target."""
    low, high = p.problem.gbs_target
    return np.bool_(low <= p.gbs <= high)


RULES = (global_batch, token_target, batch_range)
