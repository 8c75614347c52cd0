"""What a user writes (``GPU:NxG``, a preset's name, a file, a dict) becomes a cluster or a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from parsolve import presets
from parsolve.errors import SpecError, UnknownNameError
from parsolve.files import SUFFIXES, read_file
from parsolve.specs import Cluster, Model

__all__ = ["load_cluster", "load_model", "read_file"]


def _text(source: object, what: str) -> str:
    if not isinstance(source, (str, Path)):
        raise SpecError(f"expected a name, a file or a dict, got {type(source).__name__}", what)
    if not str(source).strip():
        raise SpecError("the name is empty", what)
    return str(source)


def _path(source: str | Path) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # no such user
        return Path(source)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the system, a zero byte
        return False


def _is_path(text: str, path: Path) -> bool:
    """Whether ``text`` can only mean a file: by its suffix, its first character, or a folder in it that exists."""
    return path.suffix.lower() in SUFFIXES or text[0] in "./~" or (len(path.parts) > 1 and _exists(path))


def _near_files(path: Path) -> list[str]:
    """Spec files and folders beside ``path`` whose names are near misses."""
    try:
        beside = [entry for entry in islice(path.parent.iterdir(), 500) if not entry.name.startswith(".")]
        files = [str(entry) for entry in beside if entry.suffix.lower() in SUFFIXES or entry.is_dir()]
    except (OSError, ValueError):
        return []
    return difflib.get_close_matches(str(path), files, n=2, cutoff=0.8)


def _refuse_swapped(text: str, *kinds: presets.Kind) -> None:
    for kind in kinds:
        if presets.find(kind, text):
            raise SpecError(f"is a {kind.removesuffix('s')} preset; the cluster comes first, then the model", text)


def _read_named(path: Path) -> dict[str, Any]:
    if not _exists(path):
        near = _near_files(path)
        raise SpecError(f"no such file{f'; did you mean {near[0]}?' if near else ''}", str(path))
    return read_file(path)


# ---- clusters ------------------------------------------------------------------------------------------------------
def load_cluster(source: str | Path | Mapping[str, Any] | Cluster) -> Cluster:
    """A cluster from ``GPU:NxG``, a preset's name, a file, a dict of the same keys, or a cluster itself.

    ``h100-sxm:16x8`` is 16 fast domains with 8 GPUs used in each. A name means the preset before a file; write
    ``./name`` for the file.

    Raises
    ------
    SpecError: saying what is wrong, where, and how to mend it.
    """
    if isinstance(source, Cluster):
        return source
    if isinstance(source, Mapping):
        return presets.read_cluster(source, "cluster")
    text = _text(source, "cluster")
    path = _path(source)
    if isinstance(source, str) and not _is_path(text, path):
        if ":" in text and not _exists(path):
            return _from_shape(text)
        if presets.find("clusters", text):
            return presets.load_cluster_preset(text)
        gpu = presets.find("gpus", text)
        if gpu:
            size = presets.gpu_system(gpu).domain_size
            raise SpecError(f"{text!r} is a GPU; say how many: {gpu}:NxG, e.g. {gpu}:2x{size} for 2 domains of {size}")
        if not _exists(path):
            _refuse_swapped(text, "models")
            shapes = [f"{name}:NxG" for name in presets.gpu_names()]
            known = [*presets.cluster_names(), *shapes, *_near_files(path)]
            raise UnknownNameError("cluster (neither GPU:NxG nor a preset nor a file)", text, known)
    return presets.read_cluster(_read_named(path), str(path), path.stem)


def _from_shape(text: str) -> Cluster:
    """``GPU:NxG``: N fast domains with G GPUs used in each."""
    gpu, _, counts = text.partition(":")
    if re.search(r"\s", text):
        raise SpecError(f"write it without blanks: {re.sub(r'[ 	]', '', text)}", text)
    stem = presets.load_gpu(gpu, text).name
    size = presets.gpu_system(stem).domain_size
    example = f"write {stem}:NxG, N domains with G GPUs in each, e.g. {stem}:16x{size}"
    if re.fullmatch(r"[0-9]{1,9}", counts):
        raise SpecError(f"{counts!r} does not say how many GPUs a domain has; {example}", text)
    match = re.fullmatch(r"(-?[0-9]{1,9})[xX](-?[0-9]{1,9})", counts)
    if not match:
        raise SpecError(f"cannot read {counts!r}; {example}", text)
    domains, used = int(match[1]), int(match[2])
    if domains < 1 or used < 1:
        raise SpecError(f"the numbers must be 1 or more; {example}", text)
    if used > size:
        fits = f"{stem}:{domains * used // size}x{size}" if domains * used % size == 0 else f"{stem}:Nx{size}"
        raise SpecError(f"a fast domain of {stem} has {size} GPUs, not {used}; write {fits}, or a cluster file", text)
    return presets.read_cluster({"gpu": stem, "domains": domains, "gpus_per_domain": used}, text)


# ---- models --------------------------------------------------------------------------------------------------------
def load_model(source: str | Path | Mapping[str, Any] | Model, text_only: bool = False) -> Model:
    """A model from a preset's name, a spec file, a Hugging Face config (file or folder), a dict, or a model itself.

    ``text_only``: of a multimodal Hugging Face config, read the language model and leave the rest out.

    Raises
    ------
    SpecError: saying what is wrong, where, and how to mend it.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, Mapping):
        return _read_model(dict(source), "model", text_only=text_only)
    text = _text(source, "model")
    path = _path(source)
    if isinstance(source, str) and not _is_path(text, path):
        if presets.find("models", text):
            return presets.load_model_preset(text)
        if not _exists(path):
            _refuse_swapped(text.partition(":")[0], "clusters", "gpus")
            known = [*presets.model_names(), *_near_files(path)]
            raise UnknownNameError("model (neither a preset nor a file)", text, known)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise SpecError("the folder has no config.json", str(path.parent))
    return _read_model({**_read_named(path)}, str(path), path.stem, text_only)


def _read_model(data: dict[str, Any], where: str, name: str | None = None, text_only: bool = False) -> Model:
    if "model_type" in data:
        from parsolve.huggingface import read_config

        return read_config(data, where, text_only)
    if "architectures" in data or "num_hidden_layers" in data:
        raise SpecError("looks like a Hugging Face config, but has no model_type; add it", where)
    if name:
        data.setdefault("name", name)
    return Model.read(data, where)
