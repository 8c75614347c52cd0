"""Context parallelism: the sequence (or, for all-to-all, the heads) divides over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import rule
from parsolve.problem import Instance
from parsolve.specs.workload import MEGATRON_LIKE


@rule(
    "cp={cp}: the sequence length {p.seq_len} is not a multiple of 2*cp, as balanced causal chunks need",
    frameworks=(*MEGATRON_LIKE, "torchtitan"),
    source="Megatron-LM arguments.py: seq_length % (2*cp) == 0",
)
def balanced_chunks(p: Instance, *, cp: Any) -> Any:
    """Each rank takes two chunks, one from each end of the sequence, so that causal work is even."""
    return np.where(cp > 1, p.seq_len % (2 * cp) == 0, True)


@rule(
    "cp={cp} does not divide the sequence length {p.seq_len}",
    frameworks=("deepspeed", "generic"),
    source="DeepSpeed Ulysses: seq % sp == 0",
)
def sequence_chunks(p: Instance, *, cp: Any) -> Any:
    """The sequence divides over the context-parallel ranks."""
    return p.seq_len % cp == 0


@rule(
    "cp={cp}: Ulysses needs it to divide the {p.model.num_heads} heads, and to divide or be a multiple of"
    " the {p.model.num_kv_heads} key/value heads",
    frameworks=("deepspeed",),
    source="DeepSpeed Ulysses: heads % sp == 0; kv heads % sp == 0 or sp % kv heads == 0",
)
def ulysses_heads(p: Instance, *, cp: Any) -> Any:
    """All-to-all context parallelism exchanges whole heads."""
    kv = p.model.num_kv_heads
    return (p.model.num_heads % cp == 0) & ((kv % cp == 0) | (cp % kv == 0))


@rule(
    "cp={cp}: DeepSpeed's sequence parallelism needs tp=1 and pp=1 (tp={tp}, pp={pp})",
    frameworks=("deepspeed",),
    source="Megatron-DeepSpeed initialize.py: --ds-sequence-parallel-size demands tp == 1 and pp == 1",
)
def ulysses_alone(p: Instance, *, cp: Any, tp: Any, pp: Any) -> Any:
    """Megatron-DeepSpeed runs Ulysses only without tensor and pipeline parallelism."""
    return (cp == 1) | ((tp == 1) & (pp == 1))


RULES = (balanced_chunks, sequence_chunks, ulysses_heads, ulysses_alone)
