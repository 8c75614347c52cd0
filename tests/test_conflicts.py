"""Infeasible problems: the conflict is minimal, the relaxations work."""

from __future__ import annotations

import random
import time

import pytest
from oracle import enumerate_all
from problems import random_problem

import parsolve
from parsolve import Problem
from parsolve.optimizer.conflicts import first_legal, keep_only, minimal_conflict
from parsolve.restrictions import restrict


@pytest.mark.parametrize("seed", range(40))
def test_first_legal_agrees_with_the_oracle(seed: int) -> None:
    problem = random_problem(seed)
    assert (first_legal(problem) is None) == (not enumerate_all(problem))


def infeasible_problem(seed: int) -> Problem | None:
    """A random problem with random pins that leaves no plan, None when it does."""
    rng = random.Random(seed)
    problem = random_problem(seed)
    pins = {}
    for axis in rng.sample(["tp", "pp", "cp", "zero", "mbs", "vpp", "recompute", "ep", "dp"], rng.choice([1, 2, 3])):
        pins[axis] = {"recompute": rng.choice(["none", "full"]), "zero": rng.choice([0, 1, 2, 3])}.get(
            axis, rng.choice([1, 2, 3, 4, 5, 8])
        )
    problem = restrict(problem, pins)
    return problem if first_legal(problem) is None else None


def assert_minimal(problem: Problem) -> None:
    members = minimal_conflict(problem)
    assert first_legal(keep_only(problem, members)) is None
    for member in members:
        assert first_legal(keep_only(problem, [m for m in members if m is not member])) is not None


@pytest.mark.parametrize("seed", range(24))
def test_random_conflicts_are_minimal(seed: int) -> None:
    problem = infeasible_problem(seed)
    if problem is None:
        pytest.skip("feasible")
    assert_minimal(problem)


@pytest.mark.slow
def test_two_hundred_random_conflicts_are_minimal() -> None:
    """Each found within 2 s of CPU on a quiet machine (reported, not asserted); every relaxation is feasible."""
    seen, seed, slowest = 0, 1000, 0.0
    while seen < 200:
        seed += 1
        problem = infeasible_problem(seed)
        if problem is None:
            continue
        seen += 1
        start = time.process_time()
        minimal_conflict(problem)
        slowest = max(slowest, time.process_time() - start)
        assert_minimal(problem)
    print(f"\n200 conflicts, the slowest took {slowest:.2f} s of CPU")


PINNED = [
    ({"tp": 8, "pp": 3}, {}),
    ({"zero": 3, "pp": 2}, {}),
    ({"tp": 2, "mbs": 7}, {}),
    ({"recompute": "none", "mbs": 32, "tp": 1, "cp": 1}, {}),
    ({"vpp": 3, "pp": 2}, {}),
    ({"dp": 16, "pp": 2}, {}),
]


@pytest.mark.parametrize(("pin", "options"), PINNED)
def test_conflicts_are_minimal(pin: dict[str, object], options: dict[str, object]) -> None:
    base = Problem("a100-sxm-40gb:2x8", "llama2-13b", seq_len=4096, gbs=64, **options)
    problem = restrict(base, pin)
    if first_legal(problem) is not None:
        pytest.skip("feasible")
    assert minimal_conflict(problem)
    assert_minimal(problem)


def test_an_infeasible_result_explains_itself() -> None:
    problem = Problem("h100-sxm:2x8", "llama2-13b", seq_len=4096, gbs=64, framework="deepspeed")
    result = parsolve.solve(problem, pin={"pp": 2, "zero": 3})
    assert result.status == "infeasible" and result.infeasible is not None
    assert {v.rule for v in result.infeasible.conflict} == {"zero_with_pipeline", "pin pp=2", "pin zero=3"}
    changes = {r.change for r in result.infeasible.relaxations}
    assert {"drop pin pp=2", "drop pin zero=3"} <= changes
    for relaxation in result.infeasible.relaxations:
        assert relaxation.step_time_s and relaxation.step_time_s > 0


def test_too_large_a_model_says_how_much_is_missing() -> None:
    problem = Problem("a100-sxm-40gb:1x8", "llama2-70b", seq_len=2048, gbs=16)
    result = parsolve.solve(problem)
    assert result.infeasible is not None
    assert [v.rule for v in result.infeasible.conflict] == ["memory"]
    assert "GiB" in result.infeasible.conflict[0].message
    assert any("more domain" in r.change for r in result.infeasible.relaxations)
