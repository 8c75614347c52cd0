"""Writing a profile to a TOML file: the constants that differ from its base, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parsolve.specs.profile import CONSTANTS

SECONDS = ("_overhead", "_time")
ORDER = {name: index for index, name in enumerate(CONSTANTS)}


def profile_text(name: str, base: str | None, comment: str, constants: Mapping[str, tuple[float, str]]) -> str:
    """The file: ``constants`` maps a name to its value (SI units) and origin; without a base it holds them all."""
    ordered = sorted(constants.items(), key=lambda item: ORDER[item[0]])
    lines = [f"# {line}" for line in comment.splitlines()]
    lines.append(f'name = "{name}"')
    if base is not None:
        lines.append(f'base = "{base}"')
    lines += [f"{key} = {_value(key, value)}" for key, (value, _) in ordered]
    lines += ["", "[sources]"]
    lines += [f'{key} = "{origin}"' for key, (_, origin) in ordered]
    return "\n".join(lines) + "\n"


def write_profile(path: Path, name: str, base: str, comment: str, constants: Mapping[str, tuple[float, str]]) -> None:
    """Write the file of a profile."""
    path.write_text(profile_text(name, base, comment, constants), encoding="utf-8")


def _value(key: str, value: float) -> str:
    if key.endswith(SECONDS):
        return f'"{value * 1e6:.4g}us"' if value < 1e-3 else f'"{value * 1e3:.4g}ms"'
    if key == "outside_bytes":
        return f'"{value / 2**20:.0f}MiB"'
    text = f"{value:.4g}"
    return text if "." in text or "e" in text else f"{text}.0"
