"""The solver against the oracle: the same plans, the same order, the same costs, on random problems."""

from __future__ import annotations

import os

import pytest
from oracle import enumerate_all
from problems import random_problem

from parsolve.evaluation import instance_for, violations
from parsolve.optimizer.ranking import Query, layout_of, rank

DEPTHS = (1, 3, 10, 50)


def compare(seed: int, large: bool) -> None:
    problem = random_problem(seed, large)
    expected = enumerate_all(problem)
    k = DEPTHS[seed % len(DEPTHS)]
    ranking = rank(problem, Query(top=k))
    assert ranking.complete
    assert [(plan.key, plan.config) for plan in ranking.plans] == expected[:k]
    for plan in ranking.plans:
        p = instance_for(problem, plan.config.layers_per_stage, plan.config.gbs)
        assert violations(p, plan.config) == []


@pytest.mark.parametrize("block", range(30))
def test_small_problems_equal_the_oracle(block: int) -> None:
    """300 problems, ten a test."""
    for seed in range(10 * block, 10 * block + 10):
        compare(seed, large=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("PARSOLVE_ORACLE_SEEDS", "1000"))))
def test_large_problems_equal_the_oracle(seed: int) -> None:
    compare(10_000 + seed, large=True)


def test_random_problems_cover_the_kinds() -> None:
    problems = [random_problem(seed) for seed in range(300)]
    assert sum(p.model.moe is not None for p in problems) > 60
    assert {p.workload.framework for p in problems} == {"megatron", "deepspeed", "generic"}
    assert sum(p.per_token for p in problems) > 30
    assert sum(bool(p.rules) for p in problems) > 60


def test_all_plans_are_listed_without_a_cap() -> None:
    problem = random_problem(2)
    expected = enumerate_all(problem)
    ranking = rank(problem, Query(top=None))
    assert ranking.legal == len(expected) > 100
    assert [(plan.key, plan.config) for plan in ranking.plans] == expected
