"""The best cut of one configuration against brute force over every cut of the stated domain."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import oracle
import pytest
from cut_problems import LARGEST, StageProblem, plain_model, stage_problem
from seeds import first_of

import parsolve
from parsolve import Problem
from parsolve.evaluation import active_limits, instance_of, objective_tree, objective_value, violations
from parsolve.objectives.step_time import items
from parsolve.optimizer import best_cut as search
from parsolve.optimizer import cut_list
from parsolve.optimizer.any_cut import Candidates
from parsolve.optimizer.best_cut import Found, Paths, best_cut
from parsolve.optimizer.cut_caps import ShapeRows, caps, least_mix, most_mix
from parsolve.optimizer.cut_forms import Row, forms
from parsolve.optimizer.cut_list import ShapeCuts
from parsolve.optimizer.join import join
from parsolve.optimizer.likely_cuts import Likely, likely_cuts, most_promising
from parsolve.optimizer.spaces import Spaces
from parsolve.specs import Recompute
from parsolve.splits import Splits, free, free_shape, from_model_order, rank_cuts


def solve(of: StageProblem, to_beat: float, alone: bool = False) -> Found | None:
    """The solver's answer; None when no rank can do its share. ``alone``: cuts listed below paths, for one row."""
    linear = forms(of.p, of.values)
    reach = caps(of.p, linear, of.values, np.array([to_beat]))
    if not reach.possible[0]:
        return None
    times = items(of.p, of.values)
    rows = ShapeRows(linear, times, of.values, reach.most, reach.least, np.array([to_beat]))
    row = Row.of(linear, times, of.values, 0)
    cuts = ShapeCuts.of(of.p, rows)
    if alone:
        cuts = cuts.alone(of.p, 0, row, to_beat, Paths().of(row.shape))
        assert cuts.chosen is not None
    return best_cut(of.p, row, to_beat, Paths(), cuts, 0, lambda _: True)


def targets(rng: random.Random, best: float) -> float:
    """A value to beat: far above the best cut, just above, or just below it."""
    return best * rng.choice([1e3, 2.0, 1.02, 1 + 1e-6, 1 - 1e-6]) if best < math.inf else 1e12


def same(of: StageProblem, to_beat: float, best: float, alone: bool = False) -> None:
    """The cost and a cut that costs it, or none when none beats the target."""
    answer = solve(of, to_beat, alone)
    if best >= to_beat:
        assert answer is None or (answer.layers is None and answer.proven)
        return
    assert answer is not None and answer.proven and answer.layers is not None
    assert answer.cost == pytest.approx(best, rel=1e-9)
    index = of.cuts.index(answer.layers)
    assert of.legal()[index]
    assert of.costs(np.array([index]))[0] == pytest.approx(best, rel=1e-9)  # by the event simulation


def compare(seed: int, largest: int = LARGEST) -> None:
    of = stage_problem(seed, largest)
    best, _ = of.best()
    same(of, targets(random.Random(seed), best), best)


@pytest.mark.parametrize("block", range(30))
def test_the_best_cut_equals_brute_force(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 problems of up to 16 layers, 4 stages, 2 chunks; of every second block the lists count as long."""
    if block % 2:
        monkeypatch.setattr(cut_list, "LONG", 0)
    for seed in range(10 * block, 10 * block + 10):
        compare(seed)


@pytest.mark.parametrize("block", first_of(range(15), 6))
def test_cuts_listed_below_paths_equal_brute_force(block: int) -> None:
    """Each problem with a value to beat just above its best cut, where most cuts are left out, and with another."""
    for seed in range(20_000 + 10 * block, 20_010 + 10 * block):
        of = stage_problem(seed)
        best, _ = of.best()
        same(of, targets(random.Random(seed), best), best, alone=True)
        if best < math.inf:
            same(of, best * (1 + 1e-6), best, alone=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(200))
def test_the_best_cut_equals_brute_force_in_more_problems(block: int) -> None:
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        compare(seed)


@pytest.mark.parametrize("block", range(5))
def test_the_constraint_model_equals_brute_force(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without listing the cuts, as where there are too many."""
    monkeypatch.setattr(cut_list, "MAX_LISTED", 0)
    monkeypatch.setattr(search, "CutList", None)
    for seed in range(10 * block, 10 * block + 10):
        compare(seed, largest=300)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_the_constraint_model_equals_brute_force_in_more_problems(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_list, "MAX_LISTED", 0)
    monkeypatch.setattr(search, "CutList", None)
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        compare(seed)


@pytest.mark.parametrize("seed", range(12))
def test_every_cut_by_the_event_simulation(seed: int) -> None:
    """No bound, no order: each cut of the domain simulated pass by pass."""
    of = stage_problem(500 + seed, largest=60)
    best = float(of.costs().min())
    same(of, targets(random.Random(seed), best), best)
    for i, (cost, legal) in enumerate(zip(of.costs().tolist(), of.legal().tolist(), strict=True)):
        config = of.config(i)
        p = instance_of(of.p.problem, config, gbs=of.p.gbs)
        broken = {found.rule for found in violations(p, config)} & {limit.name for limit in active_limits(p.problem)}
        assert legal == (not broken)
        if legal:
            assert objective_value(p, config) == pytest.approx(cost, rel=1e-9)


def test_random_problems_cover_the_kinds() -> None:
    problems = [stage_problem(seed) for seed in range(60)]
    assert sum(len(of.cuts) > 200 for of in problems) > 3
    assert sum(0 < int(of.legal().sum()) < len(of.cuts) for of in problems) > 15
    assert sum(int(of.values["vpp"][0]) == 2 for of in problems) > 5
    kinds = [of.p.model.layer_is_moe for of in problems]
    assert sum(0 < sum(kind) < len(kind) for kind in kinds) > 10
    assert sum(not any(kind) for kind in kinds) > 12
    assert sum(bool(of.p.splits.mtp_apart[0]) for of in problems) > 5
    best = [of.best()[1] or ((1,),) for of in problems]
    assert sum(not cut[0][0] or not cut[-1][-1] for cut in best) > 3


@pytest.mark.parametrize("block", range(10))
def test_caps_never_exclude_a_cut_that_beats_the_target(block: int) -> None:
    """What each rank may hold, for several configurations of a shape at once."""
    for seed in range(8 * block, 8 * block + 8):
        of = stage_problem(seed, largest=300)
        best, cut = of.best()
        if cut is None:
            continue
        factors = np.array([1.0, 1.003, 1.03, 1.3, 1e3])
        rows = {axis: np.repeat(column, len(factors)) for axis, column in of.values.items()}
        linear = forms(of.p, rows)
        reach = caps(of.p, linear, rows, best * factors)
        bounds = of.bounds()
        for i, to_beat in enumerate((best * factors).tolist()):
            near = np.flatnonzero((bounds <= to_beat * (1 + 1e-9)) & of.legal())
            near = near[np.argsort(bounds[near], kind="stable")]
            near = np.array([of.cuts.index(cut), *near[:30], *near[30 :: len(near) // 30 + 1]])
            beats = near[of.costs(near) <= to_beat * (1 + 1e-9)]
            assert reach.possible[i] and beats[0] == near[0], seed
            totals = np.array([[sum(rank) for rank in of.cuts[j]] for j in beats])
            assert (totals <= reach.most[i]).all() and (totals >= reach.least[i]).all(), seed


def test_the_most_of_two_kinds_is_the_inverse_of_what_they_cost() -> None:
    rng = np.random.default_rng(5)
    for kinds in (("moe",), ("dense", "moe")):
        each = {kind: rng.choice([0.0, 0.3, 1.0, 2.5], 500) for kind in kinds}
        there = {kind: rng.integers(0, 9, 500) for kind in kinds}
        numbers = rng.integers(0, 20, 500)
        found = most_mix(each, there, least_mix(each, there, numbers))
        assert (found >= numbers).all()
        some = np.isfinite(found)
        assert 200 < some.sum() < 500
        more = least_mix(each, there, np.where(some, found, 0) + 1)
        assert (more > least_mix(each, there, numbers))[some].all()
        assert (most_mix(each, there, np.full(500, -1e-3)) < 0).all()


@pytest.mark.parametrize("block", range(10))
def test_the_relaxation_of_all_cuts_is_below_each(block: int) -> None:
    """Every summand of the objective and every limit, for each configuration of the other axes."""
    for seed in range(8 * block, 8 * block + 8):
        of = stage_problem(seed, largest=400)
        pp, vpp = int(of.values["pp"][0]), int(of.values["vpp"][0])
        problem, model = of.p.problem, of.p.model
        apart = bool(of.p.splits.mtp_apart[0])
        assert free_shape(model.num_layers, pp, vpp, apart)
        p = problem.instance(of.p.gbs, Splits(model.layer_is_moe, [free(pp, vpp, apart), *of.p.splits.cuts]))
        rng = random.Random(seed)
        trees = [quantity for _, quantity in objective_tree(p)] + [x.quantity(p) for x in active_limits(problem)]
        for _ in range(4):
            size = len(p.splits.cuts)
            values = {axis: np.broadcast_to(column, (size,)) for axis, column in of.values.items()}
            changes = {
                "recompute": int(rng.choice(list(Recompute))),
                "zero": rng.randrange(4),
                "grad_acc": int(rng.choice([of.values["grad_acc"][0], pp, 2 * pp, 7 * pp])),
            }
            values |= {axis: np.full(size, value) for axis, value in changes.items()}
            values["split"] = np.arange(size)
            for quantity in trees:
                each = np.broadcast_to(quantity.value(p, values), (size,))
                assert each[0] <= each[1:].min() * (1 + 1e-9) + 1e-15, (seed, quantity.name, changes)


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(2, 2, 2), (7, 4, 1), (9, 2, 3), (12, 4, 2), (31, 3, 5), (16, 1, 1)])
def test_cuts_of_a_rank_equal_their_definition(layers: int, pp: int, vpp: int) -> None:
    for rank, apart in itertools.product(range(pp), (False, True) if pp > 2 else (False,)):
        found = rank_cuts(layers, pp, vpp, rank, apart)
        cuts = [tuple(sizes) for sizes in found.sizes.tolist()]
        assert len(set(cuts)) == len(cuts) and found.total.tolist() == sorted(map(sum, cuts))
        for side, fuller_first in ((found.fuller_first, True), (found.fuller_last, False)):
            mine = {cut for cut, there in zip(cuts, side.tolist(), strict=True) if there}
            assert mine == set(oracle.rank_cuts(layers, pp, vpp, rank, fuller_first, apart))


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(5, 2, 1), (12, 2, 2), (13, 4, 2), (16, 3, 3), (7, 4, 2), (3, 2, 2)])
def test_likely_cuts_are_cuts_of_the_domain(layers: int, pp: int, vpp: int) -> None:
    """Whatever is listed early counts as the best cut of a configuration, so it must be one that is searched."""
    for apart in (False, True) if pp > 2 else (False,):
        likely = [from_model_order(cut, pp) for cut in likely_cuts(layers, pp, vpp, apart).tolist()]
        assert likely
        assert all(isinstance(n, int) for cut in likely for rank in cut for n in rank)
        assert len(set(likely)) == len(likely)
        assert set(likely) <= set(oracle.all_cuts(layers, pp, vpp, apart))


def promises(of: StageProblem, look_at: int = 1) -> list[Likely]:
    linear = forms(of.p, of.values)
    return most_promising(of.p, linear, items(of.p, of.values), of.values, Paths(), look_at)


@pytest.mark.parametrize("seed", range(40))
def test_what_likely_cuts_promise_is_never_above_what_they_cost(seed: int) -> None:
    """The order of trying them is by a bound, the nearer along paths of their own; only legal ones are offered."""
    of = stage_problem(9_000 + seed)
    for look_at in (0, 1):
        for promised, row, shape, counts in promises(of, look_at):
            cut = of.cuts.index(from_model_order(counts, shape.pp))
            cost = float(of.costs(np.array([cut]))[0])
            assert row == 0
            assert cost * 0.8 * look_at <= promised <= cost * (1 + 1e-9) < math.inf


def test_likely_cuts_are_found_for_most_problems() -> None:
    """Else the test above would show nothing."""
    found = [promises(stage_problem(9_000 + seed)) for seed in range(40)]
    assert sum(map(bool, found)) >= 20


def test_all_cuts_are_searched_where_no_listed_one_is_legal() -> None:
    """9 layers in 8 chunks: not equal, not with an end counted as a layer, not with own counts for the end ranks."""
    problem = Problem("h100-sxm:1x8", plain_model(9), seq_len=1024, gbs=64)
    pin = {"pp": 4, "vpp": 2}
    listed, every, default = (parsolve.solve(problem, top=2, pin=pin, cuts=cuts) for cuts in ("listed", "any", "auto"))
    assert listed.status == "infeasible" and "--cuts any" in listed.infeasible.explanation
    assert every.status == default.status == "optimal" and default.solver["cuts"] == "any"
    assert [plan.config for plan in every.plans] == [plan.config for plan in default.plans]
    divided = parsolve.solve(problem, top=2, pin={"pp": 3, "tp": 1, "dp": 1}, cuts="auto")
    assert divided.status == "infeasible"


def test_the_time_limit_is_kept_while_ranks_are_looked_at() -> None:
    """A deadline that has passed ends the look at a pipeline shape."""
    problem = Problem("h100-sxm:2x8", plain_model(24), seq_len=2048, gbs=256)
    space = Spaces(problem, any_cut=True).once(problem, 256)
    assert space.rows is not None
    table = join(space.rows, math.inf, 100_000).table
    table = table.keep(table.values["pp"] > 1)
    assert table.size
    rows = Candidates(space.p, table, np.zeros(table.size), deadline=0.0)
    rows.beat[:] = 1e9
    with pytest.raises(TimeoutError):
        rows.cuts(0)


def test_models_of_few_layers_may_leave_the_end_stages_without_any() -> None:
    """As check says: the embedding and the output layer on stages of their own."""
    problem = Problem("h100-sxm:1x4", plain_model(2), seq_len=1024, gbs=8)
    best = parsolve.solve(problem, top=1, pin={"pp": 4}, cuts="any").best
    assert sum(map(sum, best.config.layers_per_stage)) == 2 and best.config.pp == 4
    assert parsolve.check(problem, best.config) == []
    assert parsolve.solve(problem, top=1, pin={"pp": 4}, cuts="auto").best.config == best.config
