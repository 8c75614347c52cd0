"""Legal but doubtful: each warning with its number."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import warning
from parsolve.objectives.network import inside_domain
from parsolve.problem import Instance


@warning("{grad_acc} microbatches for {pp} pipeline stages: under 2*pp the pipeline is badly filled")
def few_microbatches(p: Instance, *, pp: Any, grad_acc: Any) -> Any:
    """Fewer than two microbatches per pipeline stage."""
    return (pp > 1) & (grad_acc < 2 * pp)


@warning(
    "filling and draining equal stages takes over 10 % of the step: (pp-1)/(vpp*m+pp-1) with pp={pp}, vpp={vpp}, "
    "m={grad_acc}"
)
def large_bubble(p: Instance, *, pp: Any, vpp: Any, grad_acc: Any) -> Any:
    """More than a tenth of the step is pipeline fill and drain where the stages are equal; no split backward pass."""
    return ((pp - 1) / (vpp * grad_acc + pp - 1) > 0.10) & (not p.workload.splits_backward)


@warning("tp={tp} over {p.cluster.fast_link.kind}: tensor-parallel traffic is in line with compute and wants NVLink")
def tensor_over_pcie(p: Instance, *, tp: Any) -> Any:
    """Tensor parallelism over a PCIe domain."""
    return (tp > 1) & ("pcie" in p.cluster.fast_link.kind.lower())


@warning("ep={ep} (etp={etp}) crosses the fast domain of {p.domain} GPUs, and the model's router has no node limit")
def experts_over_nic(p: Instance, *, ep: Any, etp: Any) -> Any:
    """Expert dispatch over the NICs without node-limited routing."""
    limited = p.model.moe is not None and p.model.moe.num_groups is not None and p.model.moe.num_groups > 1
    return (ep > 1) & ~inside_domain(p, ep, etp) & (not limited)


@warning("cp={cp} at a sequence of {p.seq_len} tokens: context parallelism usually pays from 32k on")
def short_context(p: Instance, *, cp: Any) -> Any:
    """Context parallelism on short sequences."""
    return (cp > 1) & (p.seq_len < 32768)


@warning("ZeRO-3 gathers over {shards} ranks every microbatch; beyond about 512 they stop hiding behind compute")
def wide_gathers(p: Instance, *, zero: Any, shards: Any) -> Any:
    """ZeRO-3 over very many ranks."""
    return (np.asarray(zero) == 3) & (shards > 512)


@warning("only {grad_acc} * {mbs} sequences per data-parallel rank and step: the batch of {p.gbs} is small for dp={dp}")
def starved_ranks(p: Instance, *, dp: Any, mbs: Any, grad_acc: Any) -> Any:
    """Each data-parallel rank sees a single sequence per step."""
    return (dp > 1) & (mbs * grad_acc == 1)


@warning("a batch of {p.gbs} sequences is over 5 % above the token target of {p.problem.gbs_target[0]}")
def above_target(p: Instance) -> Any:
    """The batch exceeds a token target noticeably."""
    w = p.workload
    return np.bool_(w.gbs_tokens is not None and w.gbs_tolerance is None and p.gbs > 1.05 * w.gbs_tokens / p.seq_len)


WARNINGS = (
    above_target,
    few_microbatches,
    large_bubble,
    tensor_over_pcie,
    experts_over_nic,
    short_context,
    wide_gathers,
    starved_ranks,
)
