"""Plain text: names made safe for a terminal, numbers with units, columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def clean(text: object) -> str:
    """Text without control characters: they are written as escapes, so that a name cannot steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def columns(rows: Iterable[Sequence[str]], header: Sequence[str] = (), numbers: Sequence[int] = ()) -> str:
    """Left-aligned columns two blanks apart, those in ``numbers`` right-aligned."""
    lines = (
        [list(map(clean, header)), *(list(map(clean, row)) for row in rows)]
        if header
        else [list(map(clean, row)) for row in rows]
    )
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = []
    for line in lines:
        cells = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def wrap(text: str, width: int, indent: str = "", first: str | None = None) -> str:
    """A paragraph, following lines indented; words are never broken."""
    return textwrap.fill(
        clean(text),
        max(width, 40),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def significant(value: float, digits: int = 3) -> str:
    """At least ``digits`` significant digits without an exponent for usual sizes: 12.3, 0.0123, 12345."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits}g}"
    from math import floor, log10

    return f"{value:.{max(0, digits - 1 - floor(log10(abs(value))))}f}"


def percent(fraction: float) -> str:
    """0.4412 as ``44.1``."""
    return f"{100 * fraction:.1f}"


def seconds(value: float) -> str:
    """Four significant digits in s, ms or µs; fewer than a µs in ns."""
    if value == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if abs(value) >= scale:
            return f"{significant(value / scale, 4)} {unit}"
    return f"{value:.3g} s"


def gib(value: float) -> str:
    """Bytes as GiB with two decimals, without the unit."""
    return f"{value / 2**30:.2f}"
