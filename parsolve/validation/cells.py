"""Cells of a table of runs: numbers, names and switches, blank where nothing was stated."""

from __future__ import annotations

import re
from collections.abc import Mapping

Row = Mapping[str, str]


class Unreadable(Exception):
    """A row that cannot be evaluated, with the reason that is counted."""


def text(row: Row, name: str) -> str:
    """A cell without surrounding blanks; empty when absent."""
    return (row.get(name) or "").strip()


def number(row: Row, name: str) -> float | None:
    """A cell as a number, None when blank.

    Raises
    ------
    Unreadable: the cell holds something else.
    """
    cell = text(row, name)
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        raise Unreadable(f"{name} is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise Unreadable(f"{name} is not a finite number")
    return value


def whole(row: Row, name: str, default: int | None = None) -> int:
    """A cell as a whole number from 1 up, or the default when blank.

    Raises
    ------
    Unreadable: blank without a default, a fraction, or below 1.
    """
    value = number(row, name)
    if value is None:
        if default is None:
            raise Unreadable(f"{name} is not stated")
        return default
    if value != int(value) or value < 1:
        raise Unreadable(f"{name} is not a whole number from 1 up")
    return int(value)


def switch(row: Row, name: str, default: bool = False) -> bool:
    """A cell as yes (1, true) or no."""
    cell = text(row, name).lower()
    return default if not cell else cell in ("1", "1.0", "true", "yes")


def moe_layers(pattern: str, num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers with a plain MLP for ``1``, ``first3dense``, ``4`` (every 4th) or ``([0]*3+[1]*12)``."""
    if pattern in ("", "1", "1.0"):
        return ()
    match = re.fullmatch(r"first(\d+)dense", pattern)
    if match:
        return tuple(range(int(match[1])))
    if re.fullmatch(r"\d+(\.0)?", pattern):
        every = int(float(pattern))
        return tuple(i for i in range(num_layers) if i % every)
    flags = [int(flag) for flag, times in re.findall(r"\[([01])\]\*(\d+)", pattern) for _ in range(int(times))]
    if len(flags) != num_layers:
        raise Unreadable("moe_layer_freq cannot be read")
    return tuple(i for i, flag in enumerate(flags) if not flag)


def nics(interconnect: str, gpus_per_host: int) -> tuple[int, float] | None:
    """(NICs per host, Gb/s each) that a description of the fabric states, None when it states none.

    Reads ``4x Omni-Path 100Gb/s``, ``800 Gb/s IB per node``, ``400Gb/s RDMA per GPU``; of several adapters the ones
    with the largest sum are the compute fabric.
    """
    found = [(int(n), float(rate)) for n, rate in re.findall(r"(\d+)x\s?[^,;]*?(\d+)\s?Gb", interconnect)]
    if found:
        return max(found, key=lambda item: item[0] * item[1])
    match = re.search(r"(\d+)\s?Gb(?:/s|ps)[^,;]*\bper GPU", interconnect)
    if match:
        return gpus_per_host, float(match[1])
    match = re.search(r"(\d+)\s?Gb(?:/s|ps)[^,;]*\b(?:per node|node-node)", interconnect)
    return (1, float(match[1])) if match else None
