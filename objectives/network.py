"""Where a group of ranks lies on the network and how long its collectives take, in seconds.

Rank order is Megatron's tp-cp-ep-dp-pp: tp innermost, pp outermost. A group is given by its size and its stride
(the distance between neighbouring members).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.problem import Instance


def inside_domain(p: Instance, size: Any, stride: Any) -> Any:
    """True where a group of ``size`` members ``stride`` ranks apart stays in one fast domain.

    Groups tile the ranks in blocks of size*stride, so they stay inside when the block divides the domain, or when
    the whole world is one domain.
    """
    block = size * stride
    aligned = (block <= p.domain) & (p.domain % np.maximum(block, 1) == 0)
    return aligned | (p.world <= p.domain) | (size == 1)


def members_per_domain(p: Instance, size: Any, stride: Any) -> Any:
    """How many members of a group share a fast domain (at least 1)."""
    inside = np.maximum(1, np.minimum(size, p.domain // np.maximum(stride, 1)))
    return np.where(inside_domain(p, size, stride), size, inside)


def ring_rate(p: Instance, size: Any, stride: Any) -> Any:
    """Bytes/s per direction at which a ring over the group moves data.

    Inside a domain: the fast link. Across: each domain's members share one ring edge, which has the NIC share of all
    of them; never faster than the fast link. Beyond a pod: divided by the spine's oversubscription.
    """
    cluster, profile = p.cluster, p.profile
    fast = cluster.fast_link.bandwidth * profile.fast_link_efficiency
    nic: Any = cluster.nic_bandwidth_per_gpu * profile.nic_efficiency
    if cluster.pod_size is not None:
        pod = cluster.pod_size * p.domain
        nic = np.where(size * stride > pod, nic / cluster.spine_oversubscription, nic)
    across = np.minimum(fast, nic * members_per_domain(p, size, stride))
    return np.where(inside_domain(p, size, stride), fast, across)


def hop_latency(p: Instance, size: Any, stride: Any) -> Any:
    """Start-up time of one collective: the stack's overhead and a hop for each doubling of the group, s."""
    cluster = p.cluster
    hop = np.where(inside_domain(p, size, stride), cluster.fast_link.latency, cluster.nic.latency)
    return p.profile.collective_overhead + hop * np.log2(np.maximum(size, 1))


def pass_time(p: Instance, size: Any, stride: Any, payload: Any, calls: float = 1.0) -> Any:
    """One all-gather or reduce-scatter of ``payload`` bytes (the full tensor) in ``calls`` calls, s.

    payload * (size-1)/size / rate + calls * latency; an all-reduce is two passes. 0 for a group of one.
    Source: ring algorithm, Patarasuk & Yuan 2009.
    """
    moved = payload * (size - 1) / np.maximum(size, 1)
    return np.where(size > 1, moved / ring_rate(p, size, stride) + calls * hop_latency(p, size, stride), 0.0)


def all_to_all_time(p: Instance, size: Any, stride: Any, payload: Any) -> Any:
    """Each rank sends ``payload`` bytes spread evenly over the group, s.

    The share for members in the same domain uses the fast link while the rest uses the rank's NIC share; both run at
    once, the slower decides.
    """
    cluster, profile = p.cluster, p.profile
    near = members_per_domain(p, size, stride)
    fast = payload * (near - 1) / np.maximum(size, 1) / (cluster.fast_link.bandwidth * profile.fast_link_efficiency)
    far = payload * (size - near) / np.maximum(size, 1) / (cluster.nic_bandwidth_per_gpu * profile.nic_efficiency)
    return np.where(size > 1, np.maximum(fast, far) + hop_latency(p, size, stride), 0.0)
