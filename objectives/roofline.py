"""How long one kernel takes: matrix products and memory-bound passes, in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.problem import Instance


def saturation(size: Any, half: float) -> Any:
    """``size / (size + half)``: the share of the full rate that a dimension of ``size`` allows."""
    return size / (size + half)


def alignment(size: Any) -> Any:
    """Share of the rate that tensor cores reach when a matrix side is not a multiple of 8 elements (16 bytes).

    Multiples of 8: 1; of 4: 0.75; of 2: 0.5; odd sizes fall back to CUDA cores: 0.15.
    Source: NVIDIA, Matrix Multiplication Background User's Guide, tensor core requirements (order of magnitude).
    """
    return np.select([size % 8 == 0, size % 4 == 0, size % 2 == 0], [1.0, 0.75, 0.5], 0.15)


CAST_BYTES = 4.0
"""An fp8 product reads its 16-bit input once and writes it twice in 8 bits, as it is and transposed."""


def matmul_time(
    p: Instance,
    rows: Any,
    columns: Any,
    depth: Any,
    *,
    grouped: bool = False,
    copies: Any = 1.0,
    half: bool = False,
) -> Any:
    """One product (rows x depth) @ (depth x columns) in the training precision (``half``: in 16 bits), s.

    max(2*rows*columns*depth / (peak * efficiency), bytes / HBM rate) + launch; the efficiency falls with each small
    dimension; fp8 adds the casts of the input. ``copies`` products of this size run in one kernel: the heads of a
    batch, or, ``grouped``, the experts of a rank.

    Source: roofline model (Williams et al. 2009); size factors for tile and wave quantisation, see the profile.
    """
    profile = p.profile
    rate = p.cluster.gpu.memory_bandwidth * profile.memory_efficiency
    low = p.workload.precision == "fp8" and not half
    top = profile.low_precision_gemm_efficiency if low else profile.gemm_efficiency
    if grouped:
        top *= profile.grouped_gemm_efficiency
    efficiency = (
        top
        * saturation(rows, profile.gemm_half_rows)
        * saturation(columns, profile.gemm_half_columns)
        * saturation(depth, profile.gemm_half_depth)
    )
    peak = p.matmul_peak if low else p.half_peak
    compute = 2.0 * rows * columns * depth * copies / (peak * efficiency)
    traffic = 2.0 * copies * (rows * depth + depth * columns + rows * columns)
    casts = CAST_BYTES * copies * rows * depth / rate if low else 0.0
    return np.maximum(compute, traffic / rate) + casts + profile.kernel_overhead


def streaming_time(p: Instance, traffic: Any, kernels: float = 1.0) -> Any:
    """A memory-bound pass that moves ``traffic`` bytes in ``kernels`` launches, s."""
    profile = p.profile
    return traffic / (p.cluster.gpu.memory_bandwidth * profile.memory_efficiency) + kernels * profile.kernel_overhead
