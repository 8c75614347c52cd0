"""Profiles of efficiency constants: the shipped ones by name, or a file; and which one fits a stack and a GPU."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from parsolve.errors import UnknownNameError
from parsolve.specs import Gpu, Profile

GENERATIONS = ((7.0, "volta"), (8.0, "ampere"), (9.0, "hopper"), (10.0, "blackwell"), (13.0, "later"))
"""Lowest CUDA compute capability of a hardware family; a card between two belongs to the lower one."""
STACKS = {
    "megatron": "megatron",
    "nemo": "megatron",
    "deepspeed": "megatron-deepspeed",
    "torchtitan": "fsdp",
    "accelerate": "fsdp",
    "generic": "generic",
}
"""Framework of a workload and the software stack whose constants stand for it."""


def profile_names() -> list[str]:
    """The shipped profiles."""
    folder = resources.files("parsolve") / "data" / "profiles"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


@cache
def _shipped(name: str) -> Profile:
    text = (resources.files("parsolve") / "data" / "profiles" / f"{name}.toml").read_text("utf-8")
    return read_profile(tomllib.loads(text), f"profile {name}")


def reload_profiles() -> None:
    """Forget the shipped profiles that were read: their files were written anew."""
    _shipped.cache_clear()


def read_profile(data: object, where: str) -> Profile:
    """A profile from a table of keys; with ``base`` the table replaces constants of that shipped profile.

    Raises
    ------
    SpecError: unknown keys, values out of range, an unknown base.
    """
    if isinstance(data, dict) and isinstance(data.get("base"), str):
        base = data["base"]
        if base not in profile_names():
            raise UnknownNameError("profile", base, profile_names(), f"{where}: base")
        under = _shipped(base).model_dump()
        sources = data.get("sources", {})
        merged: dict[str, Any] = {**under, **{key: value for key, value in data.items() if key != "base"}}
        merged["sources"] = {**under["sources"], **sources} if isinstance(sources, Mapping) else sources
        data = merged
    return Profile.read(data, where)


def generation(gpu: Gpu) -> str:
    """The hardware family of a GPU: volta, ampere, hopper, blackwell; the vendor's name outside NVIDIA."""
    if gpu.vendor != "nvidia":
        return gpu.vendor
    fitting = [name for lowest, name in GENERATIONS if gpu.compute_capability >= lowest]
    return fitting[-1] if fitting else "older"


def choose_profile(stack: str, gpu: Gpu) -> str:
    """The shipped profile for a software stack and a GPU: ``stack-family`` where there is one, else ``default``."""
    name = f"{stack}-{generation(gpu)}"
    return name if name in profile_names() else "default"


def load_profile(source: Profile | str | Path) -> Profile:
    """A Profile, the name of a shipped one, or a TOML/YAML/JSON file.

    Raises
    ------
    SpecError: an unknown name, or a file that cannot be read for certain.
    """
    if isinstance(source, Profile):
        return source
    if isinstance(source, str) and source in profile_names():
        return _shipped(source)
    path = Path(source)
    if not path.exists():
        raise UnknownNameError("profile", source, profile_names(), "profile")
    from parsolve.loading import read_file

    return read_profile(read_file(path), str(path))
