"""The presets that come with parsolve (GPUs, clusters, models), and cluster tables that build on a GPU preset."""

from __future__ import annotations

import copy
import functools
import importlib.resources
import re
import tomllib
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from typing import Any, Literal

from parsolve.errors import SpecError, UnknownNameError
from parsolve.specs import Cluster, Gpu, Model, Network
from parsolve.specs.base import Count, Spec

Kind = Literal["gpus", "clusters", "models"]
_STEM = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_MAKERS = re.compile(r"^(nvidia-|tesla-|amd-|instinct-)+")
SPARSE_RATIO = (1.9, 2.1)
"""A peak this many times the dense one is taken for the figure with 2:4 sparsity (exactly 2 but for rounding)."""


class GpuSystem(Spec):
    """The usual machine around a GPU: defaults for the fields of the same names in a cluster.

    Bandwidths are bytes/s per direction, latencies seconds; ``sources`` maps each field to its origin.
    """

    domain_size: Count
    gpus_per_host: Count
    fast_link: Network
    nic: Network
    nics_per_host: Count
    sources: dict[str, str]


def _folder(kind: Kind) -> Traversable:
    return importlib.resources.files("parsolve").joinpath("data").joinpath(kind)


def normalised(kind: Kind, name: str) -> str:
    """Lower case, blanks and underscores as hyphens, a GPU maker's name left out (``NVIDIA H20`` is ``h20``)."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    return _MAKERS.sub("", key) if kind == "gpus" else key


@functools.cache
def _stems(kind: Kind) -> tuple[str, ...]:
    folder = _folder(kind)
    files = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


@functools.cache
def _table(kind: Kind, stem: str) -> dict[str, Any]:
    """A preset's file as read; callers copy before they change anything."""
    return tomllib.loads(_folder(kind).joinpath(f"{stem}.toml").read_text(encoding="utf-8"))


@functools.cache
def aliases(kind: Kind) -> dict[str, str]:
    """Every other spelling, normalised, and the preset that it names. Reads all files of the kind once."""
    return {normalised(kind, alias): stem for stem in _stems(kind) for alias in _table(kind, stem).get("aliases", ())}


def find(kind: Kind, name: str) -> str | None:
    """The preset that ``name`` means (any case, aliases included), or None. An exact name opens no other file."""
    key = normalised(kind, name)
    if _STEM.fullmatch(key) and _folder(kind).joinpath(f"{key}.toml").is_file():
        return key
    return aliases(kind).get(key)


def _find(kind: Kind, name: str, where: str | None) -> str:
    stem = find(kind, name)
    if stem is None:
        raise UnknownNameError(f"{kind.removesuffix('s')} preset", name, _stems(kind), where)
    return stem


def gpu_names() -> tuple[str, ...]:
    """Names of the GPU presets, sorted."""
    return _stems("gpus")


def cluster_names() -> tuple[str, ...]:
    """Names of the cluster presets, sorted."""
    return _stems("clusters")


def model_names() -> tuple[str, ...]:
    """Names of the model presets, sorted."""
    return _stems("models")


@functools.cache
def _gpu(stem: str) -> Gpu:
    data = {key: value for key, value in _table("gpus", stem).items() if key not in ("aliases", "system")}
    return Gpu.read(data, f"GPU preset {stem}")


def load_gpu(name: str, where: str | None = None) -> Gpu:
    """A GPU preset by name or alias.

    Raises
    ------
    UnknownNameError: with near misses; ``where`` says who asked.
    """
    return _gpu(_find("gpus", name, where))


def gpu_system(name: str, where: str | None = None) -> GpuSystem:
    """The usual machine around a GPU preset.

    Raises
    ------
    UnknownNameError: with near misses.
    """
    stem = _find("gpus", name, where)
    return GpuSystem.read(_table("gpus", stem)["system"], f"GPU preset {stem}: system")


def load_cluster_preset(name: str, where: str | None = None) -> Cluster:
    """A cluster preset by name or alias.

    Raises
    ------
    UnknownNameError: with near misses.
    """
    stem = _find("clusters", name, where)
    data = {key: value for key, value in _table("clusters", stem).items() if key != "aliases"}
    return read_cluster(data, f"cluster preset {stem}")


def load_model_preset(name: str, where: str | None = None) -> Model:
    """A model preset by name or alias.

    Raises
    ------
    UnknownNameError: with near misses.
    """
    stem = _find("models", name, where)
    data = {key: value for key, value in _table("models", stem).items() if key != "aliases"}
    return Model.read(data, f"model preset {stem}")


def read_cluster(data: Mapping[str, Any], where: str, name: str | None = None) -> Cluster:
    """A cluster from a table of keys (a user's file, a preset, a dict).

    ``gpu`` is the name of a GPU preset, whose usual machine fills in what the table leaves out, or a full table (then
    all other keys are needed too). ``fast_link`` and ``nic`` may be given in part. Where a GPU's domain is one host
    (NVLink box, PCIe server), giving one of ``domain_size`` and ``gpus_per_host`` sets both.

    Raises
    ------
    SpecError: naming ``where`` and the key.
    """
    table = copy.deepcopy(dict(data))
    for key in ("domains", "gpus_per_domain"):
        if isinstance(table.get(key), (list, tuple)):
            raise SpecError(_unequal(table[key]), f"{where}: {key}")
    gpu = table.get("gpu")
    if gpu is None:
        raise SpecError(
            'this key is required: a preset such as gpu = "h100-sxm", or a full [gpu] table', f"{where}: gpu"
        )
    if isinstance(gpu, str):
        place = f"{where}: gpu"
        table = _over_system(table, gpu_system(gpu, place), where)
        table["gpu"] = load_gpu(gpu, place)
        name = name or f"{table['gpu'].name}:{table.get('domains')}x{table.get('gpus_per_domain')}"
    table.setdefault("name", name or "cluster")
    cluster = Cluster.read(table, where)
    if not isinstance(gpu, str):
        _refuse_sparse(cluster.gpu, where)
    return cluster


def _over_system(table: dict[str, Any], system: GpuSystem, where: str) -> dict[str, Any]:
    """``table`` over the defaults of ``system``, with the origin of each of these fields."""
    defaults = system.model_dump()
    origin = dict(defaults.pop("sources"))
    one_host = system.domain_size == system.gpus_per_host
    for given, follows in (("domain_size", "gpus_per_host"), ("gpus_per_host", "domain_size")):
        if one_host and given in table and follows not in table:
            defaults[follows] = table[given]
            origin[follows] = f"as {given} in {where}: the domain is one host"
    for key in defaults.keys() & table.keys():
        origin[key] = f"given in {where}"
        if key in ("fast_link", "nic") and not isinstance(table[key], Network):
            if not isinstance(table[key], Mapping):
                raise SpecError('expected a table such as { bandwidth = "400Gb/s" }', f"{where}: {key}")
            if not defaults[key].keys() <= table[key].keys():
                origin[key] += f" ({', '.join(sorted(table[key]))}); the rest: {system.sources[key]}"
            table[key] = {**defaults[key], **table[key]}
    own = table.get("sources", {})
    return {**defaults, **table, "sources": {**origin, **own} if isinstance(own, Mapping) else own}


def _unequal(counts: object) -> str:
    numbers = [n for n in counts if isinstance(n, int) and n > 0] if isinstance(counts, (list, tuple)) else []
    message = "expected one number: all domains must use the same number of GPUs"
    if not numbers:
        return message
    options = {size: sum(1 for n in numbers if n >= size) for size in sorted(set(numbers))}
    size, domains = max(options.items(), key=lambda item: (item[0] * item[1], item[0]))
    return (
        f"{message}; domains = {domains}, gpus_per_domain = {size} uses {size * domains} of these {sum(numbers)} GPUs"
    )


def _named_in(name: str) -> str | None:
    """The GPU preset with the longest spelling that stands as whole words in ``name``."""
    spellings = {**aliases("gpus"), **{stem: stem for stem in gpu_names()}}
    padded = f"-{normalised('gpus', name)}-"
    inside = [spelling for spelling in spellings if f"-{spelling}-" in padded]
    return spellings[max(inside, key=lambda spelling: (len(spelling), spelling))] if inside else None


def _refuse_sparse(gpu: Gpu, where: str) -> None:
    stem = _named_in(gpu.name)
    if stem is None:
        return
    for precision, dense in load_gpu(stem).peak_flops.items():
        given = gpu.peak_flops.get(precision, 0.0)
        if SPARSE_RATIO[0] * dense <= given <= SPARSE_RATIO[1] * dense:
            raise SpecError(
                f"{given / 1e12:g} TFLOPS is twice the dense peak of {stem}: it looks like the figure with sparsity; "
                f"write the dense one, {dense / 1e12:g} TFLOPS (or give the GPU another name)",
                f"{where}: gpu.peak_flops.{precision}",
            )
