"""Seeds of random problems: some in the default suite, all with the slow tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_of(seeds: Sequence[int], count: int) -> list[Any]:
    """The first seeds, and the others with the slow tests only."""
    return [pytest.param(seed, marks=pytest.mark.slow) if i >= count else seed for i, seed in enumerate(seeds)]
