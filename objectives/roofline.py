"""How long one kernel takes: matrix products and memory-bound passes, in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.problem import Instance


def saturation(size: Any, half: float) -> Any:
    """``size / (size + half)``: the share of the full rate that a dimension of ``size`` allows."""
    return size / (size + half)


LINE = 64
"""Elements of 16 bits in the 128 bytes that A100 and later prefer a side to be a multiple of."""
PART_LINE = 0.9
"""Share of the rate where a side is a multiple of 16 bytes only: published runs with slices of 1800 columns against
1792 (bigscience_bloom)."""


def _share_by_side(rest: int) -> float:
    for step, share in ((LINE, 1.0), (8, PART_LINE), (4, 0.75), (2, 0.5)):
        if rest % step == 0:
            return share
    return 0.15


SHARE_BY_SIDE = np.array([_share_by_side(rest) for rest in range(LINE)])


def alignment(size: Any) -> Any:
    """Share of the rate that tensor cores reach by the length of a matrix side, whole elements of 2 bytes.

    Multiples of 64: 1; of 8: 0.9; of 4: 0.75; of 2: 0.5; odd sizes fall back to CUDA cores: 0.15.
    Source: NVIDIA, Matrix Multiplication Background User's Guide, tensor core requirements (order of magnitude).
    """
    return SHARE_BY_SIDE[np.mod(size, LINE).astype(int)]


CAST_BYTES = 4.0
"""An fp8 product reads its 16-bit input once and writes it twice in 8 bits, as it is and transposed."""
TILE = 128.0 * 128.0
"""Output elements of a thread block. Source: NVIDIA, Matrix Multiplication Background User's Guide."""


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

    max(2*rows*columns*depth / (peak * efficiency), bytes / HBM rate) + launch. The efficiency falls where the output
    has few tiles to share among the processors (tile and wave quantisation), with a short inner loop and with sides
    that are no multiple of 128 bytes; fp8 adds the casts of the input. ``copies`` products of this size run in one
    kernel: the heads of a batch, or, ``grouped``, the experts of a rank.

    Source: roofline model (Williams et al. 2009); NVIDIA, Matrix Multiplication Background User's Guide.
    """
    profile = p.profile
    rate = p.cluster.gpu.memory_bandwidth * profile.memory_efficiency
    low = p.workload.precision == "fp8" and not half
    top = profile.low_precision_gemm_efficiency if low else profile.gemm_efficiency
    if grouped:
        top = top * profile.grouped_gemm_efficiency
    tiles = rows * columns * copies / TILE
    efficiency = (
        top
        * saturation(tiles, profile.gemm_half_tiles)
        * saturation(depth, profile.gemm_half_depth)
        * np.minimum(alignment(columns), alignment(depth))
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
