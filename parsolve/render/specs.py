"""A spec as a list of facts: key, value in human units, and where the number comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from parsolve.render.text import wrap
from parsolve.units import format_bytes, format_rate, format_seconds


def facts(spec: BaseModel, width: int) -> str:
    """Every key of a spec, one a line; unset keys are left out."""
    lines = []
    for key, value, source in _facts(spec, ""):
        origin = f"  [{source}]" if source else ""
        lines.append(wrap(f"{key} = {value}{origin}" if value else f"{key}{origin}", width, "      ", ""))
    general = getattr(spec, "sources", {}).get("shape")
    lines += [wrap(f"source: {general}", width, "      ", "")] if general else []
    lines += [wrap(f"note: {note}", width, "      ", "") for note in getattr(spec, "notes", ())]
    return "\n".join(lines)


def _facts(spec: BaseModel, prefix: str) -> Iterator[tuple[str, str, str]]:
    sources: Mapping[str, str] = getattr(spec, "sources", {})
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        if name in ("sources", "notes") or value is None or value == ():
            continue
        source = sources.get(name, "")
        if isinstance(value, BaseModel):
            if source:
                yield f"{prefix}{name}", "", source
            yield from _facts(value, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            for i, (key, item) in enumerate(value.items()):
                yield f"{prefix}{name}.{key}", _flops(item), source if i == 0 else ""
        else:
            yield f"{prefix}{name}", _value(name, value, _unit(field.json_schema_extra)), source


def _unit(extra: object) -> str:
    return str(extra.get("unit", "")) if isinstance(extra, Mapping) else ""


def _flops(value: Any) -> str:
    return f"{value / 1e12:g} TFLOPS" if isinstance(value, float) else str(value)


def _value(name: str, value: Any, unit: str) -> str:
    if unit == "bytes":
        return f"{format_bytes(value)} ({value:,} bytes)"
    if unit == "bytes/s":
        return format_rate(value) + ("" if name == "memory_bandwidth" else " per direction")
    if unit == "s":
        return format_seconds(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return _ranges([int(v) for v in value])
    return str(value)


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 as ``0-2, 5``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
