"""The integrity of the presets: every figure in bounds, dense, sourced, and every name found."""

from __future__ import annotations

import importlib.resources
import itertools
import tomllib
from typing import Any

import pytest

from parsolve import presets
from parsolve.errors import SpecError, UnknownNameError
from parsolve.specs import Gpu
from parsolve.units import parse_rate

GPUS = presets.gpu_names()
PEAKS = {  # dense TFLOPS as the datasheets give them: (bf16 or fp16, fp8 or None)
    "v100-sxm-32gb": (125, None),
    "t4": (65, None),
    "a100-sxm-80gb": (312, None),
    "a100-pcie-40gb": (312, None),
    "a800-sxm-80gb": (312, None),
    "h100-sxm": (989, 1979),
    "h100-pcie": (756, 1513),
    "h100-nvl": (836, 1671),
    "h800-sxm": (989, 1979),
    "h20": (148, 296),
    "h200-sxm": (989, 1979),
    "b200": (2250, 4500),
    "b300": (2250, 4500),
    "gb200-nvl72": (2500, 5000),
    "gb300-nvl72": (2500, 5000),
    "l40s": (362, 733),
    "mi250x": (191.5, None),
    "mi300x": (1307, 2615),
    "mi355x": (2517, 5033),
}
LINKS = {  # bytes/s per GPU and direction, and the GPUs of a fast domain
    "v100-sxm-32gb": (150e9, 8),
    "a100-sxm-80gb": (300e9, 8),
    "a800-sxm-80gb": (200e9, 8),
    "h100-sxm": (450e9, 8),
    "h800-sxm": (200e9, 8),
    "h200-sxm": (450e9, 8),
    "b200": (900e9, 8),
    "gb200-nvl72": (900e9, 72),
    "gb300-nvl72": (900e9, 72),
    "h100-pcie": (64e9, 8),
    "a100-pcie-80gb": (32e9, 8),
    "mi300x": (448e9, 8),
}
MEASURED = {  # spellings in published tables
    "H100-80GB-SXM": "h100-sxm",
    "A100-80GB-SXM": "a100-sxm-80gb",
    "A100": "a100-sxm-80gb",
    "GB200-186GB": "gb200-nvl72",
    "A100-40GB-SXM": "a100-sxm-40gb",
    "GB300-288GB": "gb300-nvl72",
    "V100-SXM2-16GB": "v100-sxm-16gb",
    "B200-180GB": "b200",
    "B200-SXM-180GB": "b200",
    "H100-96GB-HBM2e-500W": "h100-sxm-96gb-hbm2e",
    "A800-80GB": "a800-sxm-80gb",
    "A800-80GB-SXM": "a800-sxm-80gb",
    "B300-288GB": "b300",
    "A100-PCIe-80GB": "a100-pcie-80gb",
    "H200-141GB-SXM": "h200-sxm",
    "h100": "h100-sxm",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
    "AMD Instinct MI300X": "mi300x",
    "H200_SXM": "h200-sxm",
}


def raw(kind: str, name: str) -> dict[str, Any]:
    path = importlib.resources.files("parsolve").joinpath("data").joinpath(kind).joinpath(f"{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", GPUS)
def test_gpu_figures_are_in_bounds_and_sourced(name: str) -> None:
    gpu = presets.load_gpu(name)
    assert gpu.name == name
    assert {"compute_capability", "memory_bytes", "memory_bandwidth", "peak_flops"} <= gpu.sources.keys()
    assert all(len(text) > 10 for text in gpu.sources.values())
    assert 15e9 < gpu.memory_bytes < 320e9
    assert 0.3e12 <= gpu.memory_bandwidth <= 8e12
    half = gpu.peak_flops.get("bf16", gpu.peak_flops["fp16"])
    assert 60e12 < half <= 2.52e15
    if "fp8" in gpu.peak_flops:
        assert gpu.peak_flops["fp8"] == pytest.approx(2 * half, rel=0.02)
    if "tf32" in gpu.peak_flops:
        assert gpu.peak_flops["tf32"] == pytest.approx(half / 2, rel=0.02)
    assert gpu.peak_flops["fp32"] < half
    assert ("bf16" in gpu.peak_flops) == (gpu.vendor == "amd" or gpu.compute_capability >= 8.0)
    assert ("fp8" in gpu.peak_flops) == (name != "mi250x" and gpu.compute_capability >= 8.9)


@pytest.mark.parametrize("name", GPUS)
def test_gpu_memory_is_what_the_driver_shows_not_the_label(name: str) -> None:
    gpu = presets.load_gpu(name)
    labels = [int(part[:-2]) for spelling in raw("gpus", name)["aliases"] for part in spelling.lower().split("-")
              if part.endswith("gb") and part[:-2].isdigit()]  # fmt: skip
    for label in labels:
        assert 0.92 * label * 1e9 < gpu.memory_bytes < 1.08 * label * 1e9


@pytest.mark.parametrize("name", GPUS)
def test_gpu_system_is_sourced_and_slower_outside(name: str) -> None:
    system = presets.gpu_system(name)
    assert system.sources.keys() == {"domain_size", "gpus_per_host", "fast_link", "nic", "nics_per_host"}
    assert all("assumption" in system.sources[key] for key in ("fast_link", "nic")), "latencies are assumptions"
    assert system.domain_size % system.gpus_per_host == 0
    assert 1 <= system.nics_per_host <= system.gpus_per_host
    assert 0 < system.fast_link.latency <= system.nic.latency <= 1e-4
    assert system.nic.bandwidth * system.nics_per_host / system.gpus_per_host < system.fast_link.bandwidth
    assert 20 < presets.load_gpu(name).memory_bandwidth * 10 / system.fast_link.bandwidth < 700


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_are_the_dense_figures(name: str) -> None:
    peaks = presets.load_gpu(name).peak_flops
    half, fp8 = PEAKS[name]
    assert peaks.get("bf16", peaks["fp16"]) / 1e12 == pytest.approx(half, rel=1e-3)
    assert peaks.get("fp8", 0) / 1e12 == pytest.approx(fp8 or 0, rel=1e-3)


@pytest.mark.parametrize("name", LINKS)
def test_links_are_per_direction(name: str) -> None:
    system = presets.gpu_system(name)
    assert (system.fast_link.bandwidth, system.domain_size) == LINKS[name]


@pytest.mark.parametrize(
    ("name", "nics", "rate", "hosts"),
    [
        ("a100-sxm-80gb", 8, "200Gb/s", 8),
        ("h100-sxm", 8, "400Gb/s", 8),
        ("v100-sxm-32gb", 4, "100Gb/s", 8),
        ("t4", 1, "25Gb/s", 4),
        ("gb200-nvl72", 4, "400Gb/s", 4),
        ("gb300-nvl72", 4, "800Gb/s", 4),
    ],
)
def test_nics(name: str, nics: int, rate: str, hosts: int) -> None:
    system = presets.gpu_system(name)
    assert (system.nics_per_host, system.nic.bandwidth, system.gpus_per_host) == (nics, parse_rate(rate), hosts)


def test_memory_of_an_h100_is_the_driver_figure() -> None:
    assert presets.load_gpu("h100-sxm").memory_bytes == 81559 * 2**20


@pytest.mark.parametrize(("spelling", "name"), MEASURED.items())
def test_other_spellings(spelling: str, name: str) -> None:
    assert presets.load_gpu(spelling).name == name
    assert presets.load_gpu(spelling.upper()) is presets.load_gpu(name)


@pytest.mark.parametrize("kind", ["gpus", "clusters", "models"])
def test_spellings_are_unique(kind: presets.Kind) -> None:
    names = [presets.normalised(kind, stem) for stem in presets._stems(kind)]
    spellings = [
        presets.normalised(kind, a) for stem in presets._stems(kind) for a in raw(kind, stem).get("aliases", [])
    ]
    everything = sorted(names + spellings)
    assert [a for a, b in itertools.pairwise(everything) if a == b] == []


@pytest.mark.parametrize("name", presets.cluster_names())
def test_cluster_presets_load(name: str) -> None:
    cluster = presets.load_cluster_preset(name)
    assert cluster.name == name
    assert {"domain_size", "gpus_per_host", "fast_link", "nic", "nics_per_host"} <= cluster.sources.keys()
    assert cluster.num_gpus == cluster.hosts * cluster.processes_per_host
    assert not any("given in" in text for text in cluster.sources.values()), "every figure of a preset has an origin"


def test_cluster_presets_hold_what_they_say() -> None:
    selene = presets.load_cluster_preset("selene")
    assert (selene.num_gpus, selene.nic_bandwidth_per_gpu, selene.nic.latency) == (3072, 25e9, 5e-6)
    ethernet = presets.load_cluster_preset("pcie-4gpu-ethernet")
    assert (ethernet.num_gpus, ethernet.nic_bandwidth_per_gpu) == (8, 12.5e9 / 4)
    rack = presets.load_cluster_preset("gb200-nvl72-rack")
    assert (rack.num_gpus, rack.domain_size, rack.processes_per_host, rack.hosts) == (64, 72, 4, 16)


@pytest.mark.parametrize("name", presets.model_names())
def test_model_presets_load(name: str) -> None:
    model = presets.load_model_preset(name)
    assert model.name == name
    assert model.num_params > 0


def test_unknown_names_get_near_misses() -> None:
    with pytest.raises(UnknownNameError, match="unknown gpu preset 'h100-sxn'; did you mean h100-sxm"):
        presets.load_gpu("h100-sxn")
    with pytest.raises(UnknownNameError, match=r"^--gpu: unknown gpu preset 'zzzz'; known: a100-pcie-40gb, .*v100"):
        presets.gpu_system("zzzz", "--gpu")
    with pytest.raises(UnknownNameError, match="did you mean dgx-h100"):
        presets.load_cluster_preset("dgx-h10")
    with pytest.raises(UnknownNameError, match="unknown model preset"):
        presets.load_model_preset("no such model")
    for name in ("../gpus/h100-sxm", "", ".", "h100-sxm.toml"):
        assert presets.find("gpus", name) is None


def test_an_exact_name_opens_no_other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str) -> dict[str, str]:
        raise AssertionError(kind)

    monkeypatch.setattr(presets, "aliases", fail)
    assert presets.load_gpu("H100-SXM").name == "h100-sxm"


# ---- a user's cluster table ----------------------------------------------------------------------------------------
H100 = {"gpu": "h100-sxm", "domains": 2, "gpus_per_domain": 8}
CUSTOM_GPU = {
    "name": "accelerator-1",
    "compute_capability": 9.0,
    "memory_bytes": "64GiB",
    "memory_bandwidth": "2TB/s",
    "peak_flops": {"bf16": "400TFLOPS"},
}
CUSTOM = {
    "gpu": CUSTOM_GPU,
    "domains": 2,
    "gpus_per_domain": 4,
    "domain_size": 4,
    "gpus_per_host": 4,
    "fast_link": {"kind": "mesh", "bandwidth": "100GB/s"},
    "nic": {"kind": "Ethernet", "bandwidth": "100Gb/s"},
    "nics_per_host": 1,
}


def test_defaults_come_from_the_gpu() -> None:
    cluster = presets.read_cluster(H100, "c.toml")
    assert cluster.name == "h100-sxm:2x8"
    assert (cluster.fast_link.bandwidth, cluster.nics_per_host) == (450e9, 8)
    assert cluster.sources["nic"] == presets.gpu_system("h100-sxm").sources["nic"]
    assert H100 == {"gpu": "h100-sxm", "domains": 2, "gpus_per_domain": 8}, "the argument stays as it was"


def test_partial_tables_go_over_the_defaults() -> None:
    cluster = presets.read_cluster({**H100, "nic": {"bandwidth": "200Gb/s"}, "nics_per_host": 4}, "c.toml")
    assert (cluster.nic.kind, cluster.nic.bandwidth, cluster.nic.latency) == ("InfiniBand NDR", 25e9, 5e-6)
    assert cluster.nic_bandwidth_per_gpu == 12.5e9
    assert cluster.sources["nic"].startswith("given in c.toml (bandwidth); the rest: NVIDIA")
    assert cluster.sources["nics_per_host"] == "given in c.toml"
    assert presets.load_cluster_preset("dgx-h100").nic.bandwidth == 50e9, "the preset stays as it was"


@pytest.mark.parametrize(("given", "other"), [("domain_size", "gpus_per_host"), ("gpus_per_host", "domain_size")])
def test_domain_and_host_stay_one_where_they_are_one(given: str, other: str) -> None:
    cluster = presets.read_cluster({**H100, "gpus_per_domain": 4, given: 4}, "c.toml")
    assert (cluster.domain_size, cluster.gpus_per_host) == (4, 4)
    assert given in cluster.sources[other]
    rack = presets.read_cluster({"gpu": "gb200", "domains": 1, "gpus_per_domain": 36, "domain_size": 36}, "c.toml")
    assert (rack.domain_size, rack.gpus_per_host) == (36, 4)


def test_other_keys_pass_through() -> None:
    extra = {"spine_oversubscription": 2.0, "pod_size": 4, "price_per_gpu_hour": 2.5, "name": "mine"}
    cluster = presets.read_cluster({**H100, **extra, "sources": {"nic": "our wiki"}}, "c.toml")
    assert {key: getattr(cluster, key) for key in extra} == extra
    assert cluster.sources["nic"] == "our wiki"


def test_a_full_gpu_table() -> None:
    cluster = presets.read_cluster(CUSTOM, "c.toml", "box")
    assert (cluster.name, cluster.gpu.memory_bytes, cluster.num_gpus) == ("box", 64 * 2**30, 8)
    assert presets.read_cluster(cluster.model_dump(), "c.toml") == cluster
    assert presets.read_cluster({**CUSTOM, "gpu": cluster.gpu}, "c.toml", "box") == cluster


def test_every_preset_cluster_survives_being_written_and_read() -> None:
    for name in presets.cluster_names():
        cluster = presets.load_cluster_preset(name)
        assert presets.read_cluster(cluster.model_dump(mode="json"), "plan.json") == cluster


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": None}, r"^c.toml: gpu: this key is required: a preset such as gpu = .h100-sxm."),
        ({"gpu": "h100-sx"}, "^c.toml: gpu: unknown gpu preset 'h100-sx'; did you mean h100-sxm"),
        ({"gpu": 5}, "^c.toml: gpu: "),
        ({"domains": None}, "^c.toml: domains: "),
        ({"domains": 0}, "^c.toml: domains: .*greater than 0"),
        ({"gpus_per_domain": 2.5}, "^c.toml: gpus_per_domain: 2.5 is not a whole number"),
        ({"gpus_per_domain": 16}, "exceeds the 8 GPUs of a NVLink 4 domain"),
        ({"gpus_per_domain": [1, 4]}, "same number of GPUs; domains = 1, gpus_per_domain = 4 uses 4 of these 5 GPUs"),
        ({"gpus_per_domain": [8, 8, 4]}, "domains = 2, gpus_per_domain = 8 uses 16 of these 20 GPUs"),
        ({"domains": ["a"]}, "^c.toml: domains: expected one number"),
        ({"gpus_per_node": 8}, "^c.toml: gpus_per_node: unknown key 'gpus_per_node'; did you mean .*gpus_per_domain"),
        ({"nic": "400Gb/s"}, r"^c.toml: nic: expected a table such as \{ bandwidth"),
        ({"nic": {"bandwith": "400Gb/s"}}, "^c.toml: nic.bandwith: unknown key 'bandwith'; did you mean bandwidth"),
        ({"nic": {"bandwidth": "400GB"}}, "^c.toml: nic.bandwidth: cannot read '400GB'; write it like 400Gb/s"),
        ({"nic": {"bandwidth": 0}}, "^c.toml: nic.bandwidth: "),
        ({"spine_oversubscription": 0.5}, "^c.toml: spine_oversubscription: "),
        ({"spine_oversubscription": float("inf")}, "^c.toml: spine_oversubscription: .*finite"),
        ({"sources": "me"}, "^c.toml: sources: "),
    ],
)
def test_refused_cluster_tables(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        presets.read_cluster({**H100, **changes}, "c.toml")


def test_half_used_hosts_are_refused() -> None:
    with pytest.raises(SpecError, match="gpus_per_domain 6 is not a multiple of gpus_per_host 4"):
        presets.read_cluster({"gpu": "gb200-nvl72", "domains": 2, "gpus_per_domain": 6}, "c.toml")


@pytest.mark.parametrize(
    ("name", "peaks", "key"),
    [
        ("h100-sxm", {"bf16": "1979TFLOPS"}, "bf16"),
        ("NVIDIA H100 80GB HBM3", {"bf16": "989TFLOPS", "fp8": "3958TFLOPS"}, "fp8"),
        ("our A100 nodes", {"bf16": "624TFLOPS"}, "bf16"),
        ("H100 PCIe", {"bf16": "1513TFLOPS"}, "bf16"),
        ("GB200", {"bf16": "5PFLOPS"}, "bf16"),
    ],
)
def test_sparse_peaks_are_refused(name: str, peaks: dict[str, str], key: str) -> None:
    table = {**CUSTOM, "gpu": {**CUSTOM_GPU, "name": name, "peak_flops": peaks}}
    with pytest.raises(SpecError, match=rf"^c.toml: gpu.peak_flops.{key}: .*sparsity; write the dense one"):
        presets.read_cluster(table, "c.toml")


@pytest.mark.parametrize("name", GPUS)
def test_dense_peaks_are_taken(name: str) -> None:
    gpu = presets.load_gpu(name)
    cluster = presets.read_cluster({**CUSTOM, "gpu": gpu.model_dump()}, "c.toml")
    assert isinstance(cluster.gpu, Gpu)
    assert cluster.gpu == gpu
