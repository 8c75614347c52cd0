"""Profiles of efficiency constants: the shipped ones by name, or a file."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path

from parsolve.errors import UnknownNameError
from parsolve.specs import Profile


def profile_names() -> list[str]:
    """The shipped profiles."""
    folder = resources.files("parsolve") / "data" / "profiles"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


@cache
def _shipped(name: str) -> Profile:
    text = (resources.files("parsolve") / "data" / "profiles" / f"{name}.toml").read_text("utf-8")
    return Profile.read(tomllib.loads(text), f"profile {name}")


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

    return Profile.read(read_file(path), str(path))
