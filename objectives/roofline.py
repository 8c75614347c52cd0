"""How long one kernel takes: matrix products and memory-bound passes, in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.problem import Instance


def saturation(size: Any, half: float) -> Any:
    """``size / (size + half)``: the share of the full rate that a dimension of ``size`` allows."""
    return size / (size + half)


def matmul_time(p: Instance, rows: Any, columns: Any, depth: Any, *, grouped: bool = False, copies: Any = 1.0) -> Any:
    """One product (rows x depth) @ (depth x columns) in the training precision, s.

    max(2*rows*columns*depth / (peak * efficiency), bytes / HBM rate) + launch; the efficiency falls with each small
    dimension. ``grouped``: ``copies`` products of this size in one kernel (the experts of a rank).

    Source: roofline model (Williams et al. 2009); size factors for tile and wave quantisation, see the profile.
    """
    profile, gpu = p.profile, p.cluster.gpu
    low = p.workload.precision == "fp8"
    top = profile.low_precision_gemm_efficiency if low else profile.gemm_efficiency
    if grouped:
        top *= profile.grouped_gemm_efficiency
    efficiency = (
        top
        * saturation(rows, profile.gemm_half_rows)
        * saturation(columns, profile.gemm_half_columns)
        * saturation(depth, profile.gemm_half_depth)
    )
    compute = 2.0 * rows * columns * depth * copies / (p.matmul_peak * efficiency)
    traffic = 2.0 * copies * (rows * depth + depth * columns + rows * columns)
    return np.maximum(compute, traffic / (gpu.memory_bandwidth * profile.memory_efficiency)) + profile.kernel_overhead


def streaming_time(p: Instance, traffic: Any, kernels: float = 1.0) -> Any:
    """A memory-bound pass that moves ``traffic`` bytes in ``kernels`` launches, s."""
    profile = p.profile
    return traffic / (p.cluster.gpu.memory_bandwidth * profile.memory_efficiency) + kernels * profile.kernel_overhead
