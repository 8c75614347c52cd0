"""Infeasible problems: the conflict is minimal, the relaxations work."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from oracle import any_legal
from problems import random_problem

import parsolve
from parsolve import Problem
from parsolve.constraints.memory import stage_memory
from parsolve.evaluation import active_rules
from parsolve.functions import Limit, Rule
from parsolve.optimizer.conflicts import Feasibility, droppable, explain_infeasible, first_legal, keep_only, resized
from parsolve.optimizer.domains import build
from parsolve.problem import replace_workload
from parsolve.restrictions import restrict
from parsolve.specs import Cluster, Recompute


@pytest.mark.parametrize("seed", range(40))
def test_first_legal_agrees_with_the_oracle(seed: int) -> None:
    problem = random_problem(seed)
    assert (first_legal(problem) is None) == (not any_legal(problem))


def infeasible_problem(seed: int) -> Problem | None:
    """A random problem with random pins that leaves no plan, None when it does."""
    rng = random.Random(seed)
    problem = random_problem(seed)
    pins = {}
    for axis in rng.sample(["tp", "pp", "cp", "zero", "mbs", "vpp", "recompute", "ep", "dp"], rng.choice([1, 2, 3])):
        pins[axis] = {"recompute": rng.choice(["none", "full"]), "zero": rng.choice([0, 1, 2, 3])}.get(
            axis, rng.choice([1, 2, 3, 4, 5, 8])
        )
    taken = {rule.name.split("=")[0] for rule in problem.rules}
    problem = restrict(problem, {axis: value for axis, value in pins.items() if f"pin {axis}" not in taken})
    return problem if first_legal(problem) is None else None


def infeasible_problems(start: int, count: int) -> Iterator[Problem]:
    """So many random infeasible problems, from a seed on."""
    problems = (infeasible_problem(seed) for seed in itertools.count(start))
    return itertools.islice((problem for problem in problems if problem is not None), count)


def minimal_conflict(problem: Problem) -> list[Rule | Limit]:
    return Feasibility(problem).conflict(problem)


def assert_minimal(problem: Problem, legal: Callable[[Problem], bool] = any_legal) -> None:
    """The members leave nothing, and without any one of them a plan exists; by exhaustive enumeration unless given."""
    members = minimal_conflict(problem)
    assert not legal(keep_only(problem, members))
    for member in members:
        assert legal(keep_only(problem, [m for m in members if m is not member]))


def test_random_conflicts_are_minimal() -> None:
    for problem in infeasible_problems(0, 20):
        assert_minimal(problem)


def test_what_is_said_of_a_conflict_is_true() -> None:
    """Without which members a plan exists although all other rules hold; by exhaustive enumeration."""
    kinds: Counter[tuple[bool, bool]] = Counter()
    for problem in infeasible_problems(300, 8):
        text, everything = explain_infeasible(problem).explanation, droppable(problem)
        members = minimal_conflict(problem)
        enough = [m.name for m in members if any_legal(keep_only(problem, [x for x in everything if x is not m]))]
        kinds[len(enough) == len(members), bool(enough)] += 1
        if len(enough) == len(members):
            assert text.endswith(("without it a plan exists", "without any one of them a plan exists"))
        elif enough:
            assert text.endswith(f"without {' or without '.join(enough)} a plan exists")
        else:
            assert text.endswith("others exclude every plan as well")
    assert len(kinds) == 3  # all members, some, and none of them


def test_a_rule_that_no_choice_can_meet_is_named_first() -> None:
    problem = Problem("h100-sxm:8x8", "deepseek-v3", seq_len=4096, gbs=1000, framework="accelerate", mtp_layers=1)
    assert [rule.name for rule in minimal_conflict(problem)] == ["mtp_launcher"]


@pytest.mark.slow
def test_two_hundred_random_conflicts_are_minimal() -> None:
    """CPU-seconds to find each are reported, not asserted."""
    times = []
    for problem in infeasible_problems(1000, 200):
        start = time.process_time()
        minimal_conflict(problem)
        times.append(time.process_time() - start)
        assert_minimal(problem)
    times.sort()
    print(f"\n200 conflicts, CPU s: median {times[100]:.2f}, 95 % {times[190]:.2f}, slowest {times[-1]:.2f}")


def apply(problem: Problem, change: str) -> Problem:
    """A printed relaxation as a user would carry it out."""
    if change.startswith("drop "):
        name = change.removeprefix("drop ")
        return problem.with_(rules=[r for r in problem.rules if r.name != name])
    if change.startswith("allow recomputation"):
        return replace_workload(problem, recompute=tuple(Recompute))
    cluster = problem.cluster.model_dump()
    if match := re.fullmatch(r"([\d.]+) GiB more memory per GPU", change):
        more = math.ceil(float(match[1]) * 2**30)
        cluster["gpu"]["memory_bytes"] += more
    elif match := re.fullmatch(r"sequence length (\d+) instead of \d+", change):
        return replace_workload(problem, seq_len=int(match[1]))
    elif match := re.fullmatch(r"a global batch of (\d+) instead of \d+ sequences", change):
        return replace_workload(problem, gbs=int(match[1]))
    elif match := re.fullmatch(r"(\d+) more domain\(s\): (\d+) with (\d+) GPUs in all", change):
        cluster["domains"] += int(match[1])
        assert cluster["domains"] == int(match[2])
    elif match := re.fullmatch(r"use (\d+) of the \d+ domains \(\d+ GPUs\)", change):
        cluster["domains"] = int(match[1])
    elif match := re.fullmatch(r"use (\d+) of the \d+ GPUs in each domain", change):
        cluster["gpus_per_domain"] = int(match[1])
    else:
        raise AssertionError(f"an unknown relaxation: {change}")
    return problem.with_(cluster=Cluster.read(cluster, "cluster"))


def nearer(problem: Problem, change: str) -> Iterator[Problem]:
    """Smaller changes of the same kind, none of which may be enough."""
    if match := re.search(r"global batch of (\d+) instead of (\d+)", change):
        gbs, now = int(match[1]), int(match[2])
        for other in range(max(1, now - abs(gbs - now) + 1), now + abs(gbs - now)):
            yield replace_workload(problem, gbs=other)
    elif match := re.match(r"(\d+) more domain", change):
        for more in range(1, int(match[1])):
            yield apply(problem, f"{more} more domain(s): {problem.cluster.domains + more} with 0 GPUs in all")
    elif match := re.match(r"use (\d+) of the (\d+) domains", change):
        for domains in range(int(match[1]) + 1, int(match[2])):
            yield apply(problem, f"use {domains} of the 0 domains (0 GPUs)")
    elif match := re.match(r"use (\d+) of the (\d+) GPUs in each domain", change):
        for gpus in range(int(match[1]) + 1, int(match[2])):
            if (fewer := resized(problem, gpus_per_domain=gpus)) is not None:
                yield fewer
    elif (match := re.fullmatch(r"([\d.]+) GiB more memory per GPU", change)) and float(match[1]) > 0.01:
        yield apply(problem, f"{float(match[1]) - 0.01:.2f} GiB more memory per GPU")


def assert_relaxations_hold(problem: Problem) -> Counter[str]:
    """Every one is feasible with the step time that it states, and no smaller change of its kind is."""
    kinds: Counter[str] = Counter()
    for relaxation in explain_infeasible(problem).relaxations:
        result = parsolve.solve(apply(problem, relaxation.change), top=1)
        assert result.status == "optimal", relaxation
        assert result.best.estimate.step_time_s == pytest.approx(relaxation.step_time_s, rel=1e-12)
        for smaller in nearer(problem, relaxation.change):
            assert not any_legal(smaller), relaxation
        kinds[re.sub(r"[\d.]+", "N", relaxation.change.split(" pin ")[0])] += 1
    return kinds


def test_printed_relaxations_hold() -> None:
    kinds: Counter[str] = Counter()
    for problem in infeasible_problems(300, 16):
        kinds += assert_relaxations_hold(problem)
    assert len(kinds) >= 4


@pytest.mark.slow
def test_printed_relaxations_of_two_hundred_problems_hold() -> None:
    kinds: Counter[str] = Counter()
    for problem in infeasible_problems(2000, 200):
        kinds += assert_relaxations_hold(problem)
    print(f"\nrelaxations solved: {dict(kinds)}")
    assert sum(kinds.values()) >= 80
    assert len(kinds) == 8


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
    assert_minimal(problem, lambda asked: first_legal(asked) is not None)  # too large to enumerate


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


def test_what_refutes_all_batches_at_once_rests_on() -> None:
    """Rules that count no microbatches do not look at the batch, and memory only grows with microbatches."""
    rng = np.random.default_rng(0)
    for seed in range(12):
        problem = random_problem(seed)
        p, domains = build(problem, 8)
        values = {axis: rng.choice(domain, 400) for axis, domain in domains.items() if len(domain)}
        if len(values) < len(domains):
            continue
        other = problem.instance(1000, p.splits)
        for rule in active_rules(problem):
            if rule.axes and "grad_acc" not in rule.axes:
                assert np.array_equal(rule(p, values), rule(other, values)), rule.name
        fewer = {**values, "grad_acc": np.maximum(1, values["grad_acc"] // 2)}
        quantity = stage_memory(p)
        assert (quantity.value(p, fewer) <= quantity.value(p, values) * (1 + 1e-12)).all()
