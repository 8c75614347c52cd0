"""The rule of thumb beside every answer."""

from __future__ import annotations

import pytest

from parsolve import Problem
from parsolve.optimizer import baseline
from parsolve.presets import load_model_preset


def test_many_layers_need_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the layers do not fit into memory without interleaving, no number of chunks is tried."""
    looks = []

    def looked_at(*of: object) -> object:
        looks.append(of)
        return violations(*of)

    violations = baseline.violations
    monkeypatch.setattr(baseline, "violations", looked_at)
    model = load_model_preset("mixtral-8x7b").model_copy(update={"num_layers": 1000})
    problem = Problem("h100-sxm:128x8", model, seq_len=2048, gbs=2048, framework="generic")
    found = baseline.rule_of_thumb(problem)
    assert found is not None and found.pp == 16
    assert len(looks) < 100
