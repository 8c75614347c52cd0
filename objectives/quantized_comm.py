"""ZeRO++'s quantised traffic of ZeRO-3: weights are gathered as 8-bit integers, gradients exchanged as 4-bit integers.

Scales, 4 bytes for some 8000 elements, are left out. Source: ZeRO++ (Wang et al. 2023), qwZ and qgZ; DeepSpeed 0.19,
runtime/zero/partition_parameters.py (CUDAQuantizer), runtime/comm/coalesced_collectives.py (all_to_all_quant_reduce).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from parsolve.objectives.network import all_to_all_time
from parsolve.problem import Instance

WEIGHT_BYTES = 2.0
QUANTIZED_WEIGHT_BYTES, QUANTIZED_GRADIENT_BYTES = 1.0, 0.5


def quantizes(p: Instance, what: Literal["weights", "gradients"]) -> bool:
    """Whether ``weights`` or ``gradients`` are sent quantised. Gradients inside one host are not."""
    return p.workload.quantizes(what) and (what == "weights" or p.cluster.hosts > 1)


def gathered_bytes(p: Instance) -> float:
    """Bytes per parameter of ZeRO-3's all-gathers."""
    return QUANTIZED_WEIGHT_BYTES if quantizes(p, "weights") else WEIGHT_BYTES


def _conversion(p: Instance) -> float:
    """Bytes per element read and written to make fp16, which alone the kernels know, of bf16, or back."""
    return 0.0 if p.workload.precision == "fp16" else 4.0


def _kernels(p: Instance, traffic: Any) -> Any:
    return traffic / (p.cluster.gpu.memory_bandwidth * p.profile.memory_efficiency)


def quantized_time(p: Instance, ranks: Any, params: Any, zero: Any) -> Any:
    """What a microbatch of ZeRO-3 takes beside its rings: the kernels of two gathers, the exchange of gradients, s."""
    total = 0.0 * params
    if quantizes(p, "weights"):
        total = total + 2.0 * weight_kernels_time(p, ranks, params)
    if quantizes(p, "gradients"):
        total = total + gradient_exchange_time(p, ranks, params)
    return np.where((np.asarray(zero) == 3) & (np.asarray(ranks) > 1), total, 0.0)


def weight_kernels_time(p: Instance, ranks: Any, params: Any) -> Any:
    """Quantising a rank's share of ``params`` weights before a gather and dequantising all of them after it, s.

    Memory-bound: 2 bytes read and 1 written by the one, 1 read and 2 written by the other, and bf16 made fp16 and back.
    """
    return _kernels(p, (3.0 + _conversion(p)) * (params + params / ranks))


def gradient_exchange_time(p: Instance, ranks: Any, params: Any) -> Any:
    """Reduction of ``params`` gradients by two all-to-alls in 4 bits, in the host and then across hosts, s.

    The kernels are memory-bound. Of all gradients: made fp16, 2 bytes read and 0.5 written; what the host sends, 0.5
    read; of the host's share: 0.5 written, 0.5 read, 2 written, and 2 read to add up.
    """
    local = np.minimum(ranks, p.cluster.processes_per_host)
    near = all_to_all_time(p, local, 1, params * QUANTIZED_GRADIENT_BYTES)
    far = all_to_all_time(p, ranks / local, local, params / local * QUANTIZED_GRADIENT_BYTES)
    return near + far + _kernels(p, params * (3.0 + _conversion(p)) + params / local * 5.0)
