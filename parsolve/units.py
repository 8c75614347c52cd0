"""Human units in, SI base units inside: bytes, bytes/s, seconds, FLOP/s, tokens; and back for printing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal

from parsolve.errors import SpecError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "pi": 2.0**50}
_NUMBER = r"^\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*"
_MAX_WHOLE = 2**63
_PREFIX = r"([kKmMgGtTpP]i?)?"


def _show(text: object) -> str:
    """A value for a message, cut to a sane length."""
    if isinstance(text, int) and abs(text) >= _MAX_WHOLE:
        return "the number"
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _to_float(number: int | float, where: str | None) -> float:
    try:
        return float(number)
    except OverflowError:
        raise SpecError("the number is too large", where) from None


def _finite(value: float, text: object, where: str | None) -> float:
    if not math.isfinite(value) or value < 0:
        raise SpecError(f"{_show(text)} must be a finite number that is not negative", where)
    return value


def _scale(prefix: str | None) -> float:
    key = (prefix or "").lower()
    return _BINARY[key] if key in _BINARY else _DECIMAL[key]


def _parse(text: object, unit: str, example: str, where: str | None) -> tuple[float, str]:
    """Number times prefix, and the unit's own spelling (``B`` or ``b`` tell bytes from bits)."""
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise SpecError(f"expected a quantity such as {example}, got {_show(text)}", where)
    if isinstance(text, (int, float)):
        return _finite(_to_float(text, where), text, where), ""
    match = re.match(_NUMBER + _PREFIX + unit + r"\s*$", text)
    if not match:
        raise SpecError(f"cannot read {_show(text)}; write it like {example}", where)
    number, prefix, *rest = match.groups()
    return _finite(float(number) * _scale(prefix), text, where), (rest[0] or "") if rest else ""


def parse_bytes(text: object, where: str | None = None) -> int:
    """``80GB`` is 80e9, ``80GiB`` is 80*2**30, a bare number is bytes."""
    value, unit = _parse(text, r"([bB])?", "80GiB, 80GB or a number of bytes", where)
    if unit == "b":
        raise SpecError(f"{_show(text)} is in bits; write bytes with a capital B", where)
    if value >= _MAX_WHOLE:
        raise SpecError(f"{_show(text)} is too large for a number of bytes", where)
    return round(value)


def parse_rate(text: object, where: str | None = None) -> float:
    """Bytes per second and direction: ``400Gb/s`` (bits) is 50e9, ``450GB/s`` is 450e9; a bare number is bytes/s."""
    value, unit = _parse(
        text, r"([bB](?:its?)?)(?:/s|ps)", "400Gb/s (bits), 50GB/s (bytes) or a number of bytes/s", where
    )
    return value if unit in ("", "B") else value / 8.0


def parse_flops(text: object, where: str | None = None) -> float:
    """``989TFLOPS`` is 989e12; a bare number is FLOP/s."""
    return _parse(text, r"(?:[fF][lL][oO][pP](?:[sS]|/s)|F)", "989TFLOPS or a number of FLOP/s", where)[0]


def parse_seconds(text: object, where: str | None = None) -> float:
    """``5us``, ``3ms``, ``30s``, ``2min``, ``1h``; a bare number is seconds."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _finite(_to_float(text, where), text, where)
    match = re.match(_NUMBER + r"(ns|us|µs|ms|s|min|h)?\s*$", text) if isinstance(text, str) else None
    if not match:
        raise SpecError(f"cannot read {_show(text)} as a time; write it like 5us, 3ms, 30s or 2min", where)
    parts = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3}  # divided by, so that 5us is 5e-6 to the last bit
    seconds = {"s": 1.0, "min": 60.0, "h": 3600.0}
    unit = match[2] or "s"
    value = float(match[1]) / parts[unit] if unit in parts else float(match[1]) * seconds[unit]
    return _finite(value, text, where)


def parse_count(text: object, where: str | None = None) -> int:
    """A whole number of tokens, sequences, …: ``4M`` is 4,000,000, ``1.5T`` is 1.5e12."""
    if isinstance(text, str):
        plain = re.sub(r"(?<=[0-9])(,(?=[0-9]{3}(?![0-9]))|_(?=[0-9]))", "", text)
        match = re.match(_NUMBER + r"([kKmMgGbBtT])?\s*$", plain)
        if not match:
            raise SpecError(f"cannot read {_show(text)} as a count; write it like 1024, 4M or 1.5T", where)
        prefix = (match[2] or "").lower().replace("b", "g")
        near = float(match[1]) * _DECIMAL[prefix]
        # exact where it can be a count at all: 4.1 * 1e6 in floats is not whole
        value: Decimal | float = Decimal(match[1]) * int(_DECIMAL[prefix]) if 1e-3 < near < 1e30 else near
    elif isinstance(text, int) and not isinstance(text, bool):
        value = Decimal(text)
    else:
        value = _parse(text, r"", "1024 or 4M", where)[0]
    if not 0 <= value < _MAX_WHOLE:
        raise SpecError(f"{_show(text)} must be at least 0 and below 2**63", where)
    if value != int(value):
        raise SpecError(f"{_show(text)} is not a whole number", where)
    return int(value)


def parse_fraction(text: object, where: str | None = None) -> float:
    """``10%`` and ``0.1`` are 0.1."""
    if isinstance(text, str) and text.strip().endswith("%"):
        value = _parse(text.strip()[:-1], "", "10% or 0.1", where)[0] / 100.0
    else:
        value = _parse(text, "", "10% or 0.1", where)[0]
    if value >= 1.0:
        raise SpecError(f"{_show(text)} must be below 100%", where)
    return value


def format_bytes(value: float) -> str:
    """GiB with two decimals from 0.1 GiB up, else MiB."""
    return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**30 / 10 else f"{value / 2**20:.1f} MiB"


def format_seconds(value: float) -> str:
    """Three significant digits in s, ms or µs."""
    if value == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale or unit == "µs":
            digits = max(0, 2 - math.floor(math.log10(abs(value) / scale)))
            return f"{value / scale:.{min(digits, 3)}f} {unit}"
    raise AssertionError


def format_rate(value: float) -> str:
    """GB/s per direction."""
    return f"{value / 1e9:g} GB/s"


def format_count(value: float) -> str:
    """8.03e9 as ``8.03 B`` and so on, for parameters and tokens."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:g}"


def fold_layers(layers_per_stage: Sequence[Sequence[int]], schedule: str = "1f1b") -> str:
    """``15|16*6|15``: layers per chunk in model order, repeats folded."""
    from parsolve.splits import model_order

    runs: list[list[int]] = []
    for n in model_order(layers_per_stage, schedule):
        if runs and runs[-1][0] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    return "|".join(f"{n}*{times}" if times > 1 else str(n) for n, times in runs)
