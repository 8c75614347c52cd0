"""The solver against the oracle: the same plans, the same order, the same costs, on random problems."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from oracle import all_rows, enumerate_all
from problems import random_problem
from seeds import first_of

import parsolve
from parsolve import Problem, SpecError
from parsolve.config import Config
from parsolve.constraints.memory import stage_memory
from parsolve.evaluation import instance_of, objective_rows, objective_value, stage_memories, violations
from parsolve.functions import Limit, rule
from parsolve.optimizer import ranking as ranking_module
from parsolve.optimizer.domains import reachable_batches
from parsolve.optimizer.ranking import ANY_CUT_TOP, Query, Ranking, layout_of, rank, rank_key, without_cut
from parsolve.optimizer.solve import PARETO_STEP
from parsolve.problem import STEP_TIME, Instance, replace_workload
from parsolve.restrictions import restrict
from parsolve.specs import Recompute
from parsolve.specs.workload import SPLIT_BACKWARD

DEPTHS = (1, 3, 10, 50)


def without_cuts(ranking: Ranking) -> list[tuple[float, Config]]:
    """Equally fast cuts of one plan are equally good."""
    return [(plan.key, without_cut(plan.config)) for plan in ranking.plans]


def compare(seed: int, large: bool, k: int) -> None:
    problem = random_problem(seed, large)
    any_cut = k <= ANY_CUT_TOP
    ranking = rank(problem, Query(top=k, cuts="any" if any_cut else "listed"))
    assert ranking.complete
    expected = enumerate_all(problem, k, any_cut)
    if any_cut:
        assert without_cuts(ranking) == [(key, without_cut(config)) for key, config in expected]
    else:
        assert [(plan.key, plan.config) for plan in ranking.plans] == expected
    for plan in ranking.plans:
        p = instance_of(problem, plan.config)
        assert violations(p, plan.config) == []


@pytest.mark.parametrize("block", first_of(range(30), 16))
def test_small_problems_equal_the_oracle(block: int) -> None:
    """300 problems with the slow tests, 160 without, ten a test."""
    for seed in range(10 * block, 10 * block + 10):
        compare(seed, large=False, k=DEPTHS[seed % len(DEPTHS)])


SCHEDULES = ("gpipe", *SPLIT_BACKWARD)
SCHEDULE_SEEDS = range(18, 42)


def scheduled_problem(schedule: str, seed: int) -> Problem:
    """At least two stages where a problem has room for them: short microbatches, as GPipe keeps them all.

    Twice the layers where a rank may need two stages.
    """
    given = random_problem(20_000 + seed)
    if schedule != "gpipe":
        model = given.model.model_copy(update={"num_layers": 2 * given.model.num_layers})
        given = given.with_(model=model)
    framework = "torchtitan" if seed % 2 else "generic"
    given = replace_workload(given, framework=framework, framework_version=None, schedule=schedule, seq_len=512)
    given = given.with_(without={"torchtitan_family", "tied_pipeline"})  # the random models are of no family
    return restrict(given, minimum={"pp": 2})


@pytest.mark.parametrize("seed", first_of(SCHEDULE_SEEDS, 6))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_schedules_equal_the_oracle(schedule: str, seed: int) -> None:
    given = scheduled_problem(schedule, seed)
    ranking = rank(given, Query(top=10))
    assert ranking.complete
    assert without_cuts(ranking) == [(key, without_cut(config)) for key, config in enumerate_all(given, 10, True)]
    for plan in ranking.plans:
        p = instance_of(given, plan.config)
        assert violations(p, plan.config) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_problems_of_other_schedules_have_pipelines(schedule: str) -> None:
    plans = {seed for seed in SCHEDULE_SEEDS if rank(scheduled_problem(schedule, seed), Query(top=1)).plans}
    assert len({seed for seed in plans if seed % 2}) >= 4 and len({seed for seed in plans if seed % 2 == 0}) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("PARSOLVE_ORACLE_SEEDS", "1000"))))
def test_large_problems_equal_the_oracle(seed: int) -> None:
    compare(10_000 + seed, large=True, k=50)


def test_random_problems_cover_the_kinds() -> None:
    problems = [random_problem(seed) for seed in range(300)]
    assert sum(p.model.moe is not None for p in problems) > 60
    assert {p.workload.framework for p in problems} == {
        "megatron",
        "deepspeed",
        "generic",
        "torchtitan",
        "accelerate",
        "nemo",
    }
    assert sum(p.per_token for p in problems) > 30
    assert sum(bool(p.rules) for p in problems) > 60


def test_all_plans_are_listed_without_a_cap() -> None:
    problem = Problem("a100-sxm-80gb:1x4", "qwen2.5-7b", seq_len=2048, gbs=8)
    expected = enumerate_all(problem)
    ranking = rank(problem, Query(top=None))
    assert ranking.legal == len(expected) > 20
    assert [(plan.key, plan.config) for plan in ranking.plans] == expected


@pytest.mark.parametrize("seed", [14, 18, 51])
def test_a_first_look_that_misses_plans_is_made_good(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins of the cuts that can be listed, cut off after a row: they miss plans, of one stage among them."""
    monkeypatch.setattr(ranking_module, "JOIN_ROWS", 1)
    monkeypatch.setattr(ranking_module, "SAMPLE_ROWS", 1)
    compare(seed, large=False, k=3)


@pytest.mark.parametrize("seed", range(12))
def test_within_and_distinct_equal_the_oracle(seed: int) -> None:
    problem = random_problem(seed)
    expected = enumerate_all(problem)
    if not expected:
        pytest.skip("infeasible")
    cap = expected[0][0] * 1.05
    within = rank(problem, Query(None, cap))
    assert [(plan.key, plan.config) for plan in within.plans] == [row for row in expected if row[0] <= cap]
    first: dict[tuple[int, ...], tuple[float, object]] = {}
    for key, config in expected:
        first.setdefault(layout_of(config), (key, config))
    distinct = rank(problem, Query(8, distinct=True, cuts="listed"))
    assert distinct.complete
    assert [(plan.key, plan.config) for plan in distinct.plans] == list(first.values())[:8]


@pytest.mark.parametrize("seed", first_of(range(24), 12))
def test_long_lists_over_any_cut(seed: int) -> None:
    """Whole when they are short after all; else the first plans are the best over any cut, and none is worse."""
    problem = random_problem(seed)
    expected = enumerate_all(problem, 60, any_cut=True)
    if not expected:
        pytest.skip("infeasible")
    cap = expected[0][0] * 1.02
    inside = [row for row in expected if row[0] <= cap]
    within = rank(problem, Query(None, cap, cuts="any"))
    assert within.complete
    if len(inside) < ANY_CUT_TOP:
        assert within.cuts in ("any", "listed") and len(within.plans) == len(inside)
    names = [(key, without_cut(config)) for key, config in expected[:ANY_CUT_TOP]]
    long = rank(problem, Query(top=60, cuts="any"))
    assert long.complete and without_cuts(long)[:ANY_CUT_TOP] == names
    assert without_cuts(within)[: len(inside)][:ANY_CUT_TOP] == names[: len(inside)]
    listed = rank(problem, Query(top=60, cuts="listed"))
    assert all(mine.key <= theirs.key for mine, theirs in zip(long.plans, listed.plans, strict=False))


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_of_a_byte_less_than_the_best_plan_needs(seed: int) -> None:
    problem = random_problem(seed)
    best = enumerate_all(problem, 1, any_cut=True)
    if not best:
        pytest.skip("infeasible")
    p = instance_of(problem, best[0][1])
    budget = max(stage.total for stage in stage_memories(p, best[0][1])) - 1
    tight = problem.with_(limits=[Limit("a byte less", stage_memory, lambda p: float(budget), "")])
    expected = enumerate_all(tight, 3, any_cut=True)
    ranking = rank(tight, Query(top=3, cuts="any"))
    assert ranking.complete
    assert without_cuts(ranking) == [(key, without_cut(config)) for key, config in expected]


def test_a_rule_over_cuts_leaves_the_listed_ones() -> None:
    """The best of all cuts cannot be looked for under a rule that speaks of cuts."""
    kinds = (Recompute.NONE, Recompute.FULL)  # few enough to enumerate
    problem = Problem("h100-sxm:2x8", "llama2-13b", seq_len=4096, gbs=64, recompute=kinds)
    unequal = problem.with_(rules=[rule("unequal cuts only")(_unequal)])
    ranking = rank(unequal, Query(top=5, cuts="any"))
    assert ranking.cuts == "listed" and ranking.complete
    assert [(plan.key, plan.config) for plan in ranking.plans] == enumerate_all(unequal, 5)


def _unequal(p: Instance, *, split: Any) -> Any:
    return ~p.splits.even[split]


def test_a_hint_outside_the_cuts_asked_for_is_ignored() -> None:
    """Faster plans with cuts that are not listed, one of a pipeline shape that has listed cuts too."""
    kinds = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)  # recompute=block has listed cuts in any case
    problem = Problem("h100-sxm:16x8", "llama2-70b", seq_len=4096, gbs=1024, recompute=kinds)
    hint = [plan.config for plan in parsolve.solve(problem, top=5, cuts="any").plans]
    plain, hinted = (parsolve.solve(problem, top=3, cuts="listed", hint=given) for given in ([], hint))
    assert not {*hint} & {plan.config for plan in plain.plans}
    assert any((config.pp, config.vpp) == (4, 8) for config in hint) and 8 in plain.domains["vpp"]
    assert [plan.config for plan in hinted.plans] == [plan.config for plan in plain.plans]


@pytest.mark.parametrize("seed", range(12))
def test_least_memory_equals_the_oracle(seed: int) -> None:
    problem = random_problem(seed).with_(goal=((1.0, "memory"),))
    expected = enumerate_all(problem, 3)
    ranking = rank(problem, Query(3))
    assert [(plan.key, plan.config) for plan in ranking.plans] == expected


@pytest.mark.parametrize("seed", first_of(range(100, 140), 14))
def test_shard_groups_equal_the_oracle(seed: int) -> None:
    problem = replace_workload(random_problem(seed), shard_group=(2, 4, 3)[seed % 3])
    expected = enumerate_all(problem, 10, any_cut=True)
    ranking = rank(problem, Query(top=10, cuts="any"))
    assert without_cuts(ranking) == [(key, without_cut(config)) for key, config in expected]


@pytest.mark.parametrize("what", ["weights", "gradients", "both"])
def test_quantised_traffic_equals_the_oracle(what: str) -> None:
    options = {"seq_len": 2048, "gbs": 64, "framework": "deepspeed", "zero_quantized": what}
    problem = Problem("a100-sxm-80gb:2x8", "llama2-7b", **options)
    expected = enumerate_all(problem, 10, any_cut=True)
    assert expected
    ranking = rank(problem, Query(top=10, cuts="any"))
    assert without_cuts(ranking) == [(key, without_cut(config)) for key, config in expected]


@pytest.mark.parametrize("seed", [1, 4, 8])
def test_the_pareto_front_equals_the_oracle(seed: int) -> None:
    problem = random_problem(seed)
    if not enumerate_all(problem, 1, any_cut=True):
        pytest.skip("infeasible")
    budget = float("inf")

    def fastest_within() -> list[tuple[float, Config]]:
        within = Limit("within", stage_memory, lambda p, budget=budget: budget, "")
        return enumerate_all(problem.with_(limits=[within]), 1, any_cut=True)

    for plan in parsolve.solve(problem, pareto=True, cuts="any").plans:
        p = instance_of(problem, plan.config)
        memory = max(stage.total for stage in stage_memories(p, plan.config))
        assert memory <= budget
        assert rank_key(objective_value(p, plan.config)) == fastest_within()[0][0]
        budget = memory * (1 - PARETO_STEP)
    assert not fastest_within()


def test_a_hint_changes_nothing_but_the_way() -> None:
    problem = Problem("h100-sxm:2x8", "llama2-13b", seq_len=4096, gbs=64)
    plain = parsolve.solve(problem, top=5)
    hinted = parsolve.solve(problem, top=5, hint=[plan.config for plan in plain.plans[2:]])
    assert [plan.config for plan in hinted.plans] == [plan.config for plan in plain.plans]


def test_counterfactuals_are_solved() -> None:
    problem = Problem("h100-sxm:2x8", "llama2-13b", seq_len=4096, gbs=64)
    result = parsolve.solve(problem, top=1, explain=True)
    assert len(result.counterfactuals) > 10
    for item in result.counterfactuals:
        axis, value = item.change.split("=")
        again = parsolve.solve(problem, top=1, pin={axis: value})
        if not item.proven:  # on a busy machine the time may run out, and that is said
            assert item.step_time_s is None or again.best.estimate.step_time_s <= item.step_time_s
        elif item.step_time_s is None:
            assert again.status == "infeasible"
            assert item.cause.startswith("illegal")
        else:
            assert again.best.estimate.step_time_s == item.step_time_s >= result.best.estimate.step_time_s


@pytest.mark.parametrize(
    "options", [{"gbs": 20, "gbs_tolerance": 0.1}, {"gbs_tokens": 40_000}, {"gbs_tokens": 33_000, "seq_len": 512}]
)
def test_distinct_layouts_across_batches_equal_the_oracle(options: dict[str, object]) -> None:
    """The best of a layout may be at another batch than the one being proven."""
    problem = Problem("a100-sxm-40gb:1x4", "qwen2.5-7b", **{"seq_len": 2048, **options})
    expected = enumerate_all(problem)
    first: dict[tuple[int, ...], tuple[float, object]] = {}
    for key, config in expected:
        first.setdefault(layout_of(config), (key, config))
    ranking = rank(problem, Query(6, distinct=True, cuts="listed"))
    assert ranking.complete
    assert first
    assert [(plan.key, plan.config) for plan in ranking.plans] == list(first.values())[:6]


@pytest.mark.parametrize("objective", ["step_time", "memory", "step_time~5%,memory", "0.5*step_time+0.5*memory"])
def test_relative_is_at_least_one(objective: str) -> None:
    problem = Problem("h100-sxm:2x8", "llama2-13b", seq_len=4096, gbs=64)
    plans = parsolve.solve(problem, top=6, objective=objective).plans
    assert min(plan.relative for plan in plans) >= 1.0


@pytest.mark.parametrize("seed", range(4))
def test_runs_and_workers_give_the_same_answer(seed: int) -> None:
    """Twice with one worker and once with two: the same bytes but for the timings."""
    problem = random_problem(seed)

    def answer(workers: int) -> dict[str, object]:
        data = parsolve.solve(problem, top=7, workers=workers).to_json()
        data["solver"] = {name: v for name, v in data["solver"].items() if name not in ("wall_s", "cpu_s")}
        return data

    first = answer(1)
    assert answer(1) == first
    assert answer(2) == first


def test_a_worker_is_needed() -> None:
    with pytest.raises(SpecError, match="worker"):
        parsolve.solve(Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=4096, gbs=8), workers=0)


def test_counterfactuals_know_the_list_over_any_cut() -> None:
    """They are asked of listed cuts; a plan of the list with another cut is cheaper, and they are not called proven."""
    problem = Problem("h100-sxm:4x8", "llama2-70b", seq_len=4096, gbs=512)
    result = parsolve.solve(problem, top=20, cuts="any", explain=True)
    assert result.solver["cuts"] == "any"
    times = {item.change: item for item in result.counterfactuals if item.step_time_s is not None}
    assert times and not all(item.proven for item in times.values())
    for plan in result.plans:
        for axis in ("pp", "vpp", "tp"):
            item = times.get(f"{axis}={getattr(plan.config, axis)}")
            assert item is None or item.step_time_s <= plan.estimate.step_time_s * (1 + 1e-9)


def test_the_second_objective_chooses_among_all_cuts_and_recomputed_layers() -> None:
    """Of everything within the tolerance the leanest, whatever is best for the step time of its configuration."""
    compared = 0
    for seed in range(4_000, 4_030):
        problem = random_problem(seed)
        if len(reachable_batches(problem)) > 1 or problem.goal != STEP_TIME:
            continue
        p, values, legal = all_rows(problem, reachable_batches(problem)[0])
        if not legal.any():
            continue
        rows = {axis: column[legal] for axis, column in values.items()}
        times = objective_rows(p, rows)
        exact: dict[int, float] = {}
        for i in np.argsort(times.bound, kind="stable").tolist():
            if exact and times.bound[i] > 1.1 * min(exact.values()):
                break
            exact[i] = times.exact(i)
        within = [i for i, time in exact.items() if time <= 1.1 * min(exact.values())]
        leanest = float(np.broadcast_to(stage_memory(p).value(p, rows), legal[legal].shape)[within].min())
        best = parsolve.solve(problem, objective="step_time~10%,memory", top=1, cuts="listed").best
        assert best.estimate.memory_bytes["total"] == pytest.approx(leanest, rel=1e-6)
        compared += 1
    assert compared >= 10
