"""The cluster: GPUs, the fast domains they share, and the network between the domains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from parsolve.specs.base import Bytes, BytesPerSecond, Count, FlopsPerSecond, Seconds, Spec


class Gpu(Spec):
    """One accelerator as the driver shows it. Peaks are dense (never the sparse figure); rates are per direction.

    ``peak_flops`` maps a precision (``bf16``, ``fp16``, ``fp8``, ``fp4``, ``fp32``) to FLOP/s; a precision that is
    absent is not supported by the hardware. ``sources`` maps a field to where its number comes from.
    """

    name: str
    vendor: Literal["nvidia", "amd"] = "nvidia"
    compute_capability: float = Field(gt=0, description="NVIDIA compute capability, e.g. 9.0; gfx number / 100 for AMD")
    memory_bytes: Bytes = Field(gt=0, description="what the driver reports as total memory")
    memory_bandwidth: BytesPerSecond
    peak_flops: dict[str, FlopsPerSecond]
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_a_training_precision(self) -> Gpu:
        known = {"bf16", "fp16", "fp8", "fp4", "fp32", "tf32"}
        unknown = sorted(set(self.peak_flops) - known)
        if unknown:
            raise ValueError(f"peak_flops has the unknown precision {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if not {"bf16", "fp16"} & set(self.peak_flops):
            raise ValueError("peak_flops needs bf16 or fp16")
        return self


class Network(Spec):
    """A network level as one GPU or NIC sees it: ``bandwidth`` in bytes/s per direction, ``latency`` in s per hop.

    ``efficiency`` is the share of the bandwidth that GPU memory reaches where the adapter cannot serve it by itself.
    """

    kind: str
    bandwidth: BytesPerSecond
    latency: Seconds = 5e-6
    efficiency: float = Field(default=1.0, gt=0, le=1)


class Cluster(Spec):
    """``domains`` fast domains (NVLink, xGMI or the PCIe host) with ``gpus_per_domain`` GPUs used in each.

    ``domain_size`` is the number of GPUs that the fast domain physically has; using fewer is fine (64 of an NVL72).
    ``gpus_per_host`` is torchrun's processes per host. ``nic`` is one NIC; ``nics_per_host`` of them serve a host's
    GPUs. ``spine_oversubscription`` divides the NIC rate for groups that leave a pod of ``pod_size`` domains
    (absent: the NIC level is non-blocking). ``price_per_gpu_hour`` is in any currency.
    """

    name: str
    gpu: Gpu
    domains: Count
    gpus_per_domain: Count
    domain_size: Count
    gpus_per_host: Count
    fast_link: Network
    nic: Network
    nics_per_host: Count
    spine_oversubscription: float = Field(default=1.0, ge=1.0)
    pod_size: Count | None = None
    price_per_gpu_hour: float | None = Field(default=None, gt=0)
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        if self.gpus_per_domain > self.domain_size:
            raise ValueError(
                f"gpus_per_domain {self.gpus_per_domain} exceeds the {self.domain_size} GPUs of a "
                f"{self.fast_link.kind} domain; use more domains with fewer GPUs each"
            )
        if self.gpus_per_domain > self.gpus_per_host and self.gpus_per_domain % self.gpus_per_host:
            raise ValueError(
                f"gpus_per_domain {self.gpus_per_domain} is not a multiple of gpus_per_host {self.gpus_per_host}: "
                "hosts must be used alike"
            )
        return self

    @property
    def num_gpus(self) -> int:
        """All GPUs used."""
        return self.domains * self.gpus_per_domain

    @property
    def processes_per_host(self) -> int:
        """torchrun's --nproc-per-node."""
        return min(self.gpus_per_host, self.gpus_per_domain)

    @property
    def hosts(self) -> int:
        """torchrun's --nnodes."""
        return self.num_gpus // self.processes_per_host

    @property
    def nic_bandwidth_per_gpu(self) -> float:
        """A GPU's share of its host's NICs when all GPUs of the host send at once, bytes/s per direction."""
        return self.nic.bandwidth * self.nic.efficiency * self.nics_per_host / self.processes_per_host
