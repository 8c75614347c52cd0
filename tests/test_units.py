"""Human units in, SI units inside."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsolve import units
from parsolve.errors import SpecError

STABLE = settings(derandomize=True, deadline=None)
PARSERS = [
    units.parse_bytes,
    units.parse_rate,
    units.parse_flops,
    units.parse_seconds,
    units.parse_count,
    units.parse_fraction,
]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80GB", 80e9),
        (units.parse_bytes, "80GiB", 80 * 2**30),
        (units.parse_bytes, " 80 GiB ", 80 * 2**30),
        (units.parse_bytes, "81559MiB", 81559 * 2**20),
        (units.parse_bytes, "0", 0),
        (units.parse_bytes, 1024, 1024),
        (units.parse_rate, "400Gb/s", 50e9),
        (units.parse_rate, "400Gbps", 50e9),
        (units.parse_rate, "400Gbit/s", 50e9),
        (units.parse_rate, "400GBit/s", 50e9),
        (units.parse_rate, "450GB/s", 450e9),
        (units.parse_rate, "3.35TB/s", 3.35e12),
        (units.parse_rate, 50e9, 50e9),
        (units.parse_flops, "989TFLOPS", 989e12),
        (units.parse_flops, "989 TFLOPs", 989e12),
        (units.parse_flops, "1.98PFLOP/s", 1.98e15),
        (units.parse_seconds, "5us", 5e-6),
        (units.parse_seconds, "5µs", 5e-6),
        (units.parse_seconds, "2min", 120),
        (units.parse_seconds, "1h", 3600),
        (units.parse_seconds, 0.5, 0.5),
        (units.parse_count, "4M", 4_000_000),
        (units.parse_count, "4.1M", 4_100_000),
        (units.parse_count, "8.03B", 8_030_000_000),
        (units.parse_count, "1.5T", 1_500_000_000_000),
        (units.parse_count, "1,048,576", 1_048_576),
        (units.parse_count, "1_024", 1024),
        (units.parse_count, 1024.0, 1024),
        (units.parse_count, 2**60 + 1, 2**60 + 1),
        (units.parse_fraction, "10%", 0.1),
        (units.parse_fraction, 0.1, 0.1),
        (units.parse_fraction, 0, 0),
    ],
)
def test_reads(parse: Callable[[object], float], text: object, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (units.parse_bytes, "80Gb", "bits"),
        (units.parse_bytes, "eighty", "cannot read 'eighty'; write it like 80GiB"),
        (units.parse_bytes, "-5GB", "cannot read"),
        (units.parse_bytes, -5, "not negative"),
        (units.parse_bytes, "1e300", "too large"),
        (units.parse_bytes, math.inf, "finite"),
        (units.parse_bytes, 10**400, "too large"),
        (units.parse_rate, "400Gb", "write it like 400Gb/s"),
        (units.parse_rate, "400", "write it like 400Gb/s"),
        (units.parse_flops, "989T", "write it like 989TFLOPS"),
        (units.parse_flops, True, "got True"),
        (units.parse_seconds, "5 parsecs", "write it like 5us"),
        (units.parse_seconds, None, "as a time"),
        (units.parse_count, "1.5", "not a whole number"),
        (units.parse_count, "1,5", "cannot read"),
        (units.parse_count, "4Mi", "cannot read"),
        (units.parse_count, 10**400, r"below 2\*\*63"),
        (units.parse_count, "1e999999999", r"below 2\*\*63"),
        (units.parse_count, math.nan, "finite"),
        (units.parse_count, [], "got \\[\\]"),
        (units.parse_fraction, "100%", "below 100%"),
        (units.parse_fraction, "-1%", "cannot read"),
    ],
)
def test_refuses(parse: Callable[[object, str], float], text: object, message: str) -> None:
    with pytest.raises(SpecError, match=f"^file: key: .*{message}") as caught:
        parse(text, "file: key")
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("parse", PARSERS)
@STABLE
@given(
    text=st.one_of(st.text(alphabet="0123456789.eE+-kKMGTPib/sFLOPS%,_ \n", max_size=12), st.floats(), st.integers())
)
def test_never_anything_but_a_spec_error(parse: Callable[[object], float], text: object) -> None:
    try:
        value = parse(text)
    except SpecError:
        return
    assert math.isfinite(value)
    assert value >= 0


@STABLE
@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_counts_are_exact(number: int) -> None:
    assert units.parse_count(number) == units.parse_count(str(number)) == number


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (units.format_bytes(81559 * 2**20), "79.65 GiB"),
        (units.format_bytes(2**20), "1.0 MiB"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(12.345), "12.3 s"),
        (units.format_seconds(0.012345), "12.3 ms"),
        (units.format_seconds(5e-6), "5.00 µs"),
        (units.format_rate(450e9), "450 GB/s"),
        (units.format_count(8.03e9), "8.03 B"),
        (units.format_count(12), "12"),
    ],
)
def test_prints(text: str, shown: str) -> None:
    assert text == shown


@STABLE
@given(st.floats(min_value=0, max_value=1e300))
def test_every_time_prints(value: float) -> None:
    assert units.format_seconds(value)
