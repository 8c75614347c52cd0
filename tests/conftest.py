"""Shared problems for the tests."""

from __future__ import annotations

import pytest

from parsolve import Problem


@pytest.fixture(scope="session")
def llama70b() -> Problem:
    """Llama 2 70B on 16x8 H100."""
    return Problem("h100-sxm:16x8", "llama2-70b", seq_len=4096, gbs=1024)


@pytest.fixture(scope="session")
def mixtral() -> Problem:
    """Mixtral 8x7B on 8x8 H100."""
    return Problem("h100-sxm:8x8", "mixtral-8x7b", seq_len=4096, gbs=256)
