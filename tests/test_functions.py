"""The one idea, held for every function: keyword-only axes, and arrays give what scalars give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parsolve
from parsolve import Problem
from parsolve.constraints import LIMITS, RULES, WARNINGS
from parsolve.evaluation import time_tree
from parsolve.functions import AXES, STAGE, Count, Function, Part, Points, term
from parsolve.objectives import counts
from parsolve.optimizer.domains import build
from parsolve.problem import Instance
from parsolve.specs.workload import SPLIT_BACKWARD
from parsolve.splits import Splits

PROBLEMS = {
    "dense": ("h100-sxm:2x8", "llama2-13b", "megatron"),
    "moe": ("h100-sxm:4x8", "qwen3-30b-a3b", "megatron"),
    "mla": ("h800-sxm:8x8", "deepseek-v3", "megatron"),
    "deepspeed": ("a100-sxm-80gb:2x8", "mixtral-8x7b", "deepspeed"),
    "old": ("v100-sxm-32gb:2x8", "gpt2-1.5b", "generic"),
    "groups": ("h100-sxm:4x8", "qwen3-30b-a3b", "megatron"),
    "second copies": ("h100-sxm:4x8", "llama2-13b", "deepspeed"),
    "zbv": ("h100-sxm:4x8", "qwen3-30b-a3b", "torchtitan"),
    "dualpipev": ("h800-sxm:8x8", "deepseek-v3", "generic"),
}
GROUPS = {"groups": 8, "second copies": 8}


@pytest.fixture(scope="module", params=sorted(PROBLEMS))
def sample(request: pytest.FixtureRequest) -> tuple[Instance, dict[str, np.ndarray]]:
    cluster, model, framework = PROBLEMS[request.param]
    precision = "fp16" if "v100" in cluster else "bf16"
    problem = Problem(
        cluster,
        model,
        seq_len=1024,
        gbs=64,
        framework=framework,
        precision=precision,
        shard_group=GROUPS.get(request.param),
        schedule=request.param if request.param in SPLIT_BACKWARD else "1f1b",
    )
    p, domains = build(problem, 64)
    rng = np.random.default_rng(7)
    values = {axis: rng.choice(domain, 200) for axis, domain in domains.items()}
    values[STAGE] = rng.integers(0, p.splits.slots, 200)
    return p, values


def all_parts(p: Instance) -> list[Part]:
    parts = [part for quantity in time_tree(p) for part in quantity.parts]
    return parts + [part for limit in LIMITS for part in limit.quantity(p).parts]


def functions_of(p: Instance) -> list[Function]:
    found: dict[str, Function] = {
        f.name: f for f in (*(r for r in RULES if r.applies(p.workload) or not r.needs), *WARNINGS)
    }
    for part in all_parts(p):
        for f in (part.term, part.count, part.weight):
            if f is not None:
                found[f.name] = f
    found |= {name: f for name, f in vars(counts).items() if isinstance(f, Count)}
    return list(found.values())


def test_arrays_give_what_scalars_give(sample: tuple[Instance, dict[str, np.ndarray]]) -> None:
    p, values = sample
    for f in functions_of(p):
        whole = np.broadcast_to(np.asarray(f(p, values)), (200,))
        for i in range(0, 200, 17):
            one = f(p, {axis: column[i] for axis, column in values.items()})
            assert np.asarray(one).shape == (), f.name
            assert float(one) == pytest.approx(float(whole[i]), rel=1e-12), f.name


def test_terms_are_finite_and_not_negative(sample: tuple[Instance, dict[str, np.ndarray]]) -> None:
    p, values = sample
    for part in all_parts(p):
        leaf = np.asarray(part.leaf(p, values), dtype=float)
        assert np.isfinite(leaf).all() and (leaf >= 0).all(), part.term.name
        if part.count is not None:
            assert (np.asarray(part.count(p, values)) >= 0).all(), part.count.name


def test_every_function_says_what_it_is(sample: tuple[Instance, dict[str, np.ndarray]]) -> None:
    p, _ = sample
    for f in functions_of(p):
        assert f.doc, f.name
        assert set(f.axes) <= {*AXES, STAGE}, f.name
    for part in all_parts(p):
        assert part.term.source, part.term.name
        assert part.term.unit in ("s", "B", "1"), part.term.name


def test_counts_grow_with_the_number_of_microbatches(sample: tuple[Instance, dict[str, np.ndarray]]) -> None:
    p, values = sample
    for f in vars(counts).values():
        if isinstance(f, Count) and "grad_acc" in f.axes:
            more = f(p, {**values, "grad_acc": values["grad_acc"] + 1})
            assert (np.asarray(more) >= np.asarray(f(p, values))).all(), f.name


def test_positional_axes_are_refused() -> None:
    with pytest.raises(parsolve.SpecError, match="keyword-only"):

        @parsolve.rule("no")
        def wrong(p: Any, tp: Any) -> Any:
            return tp > 0


def test_unknown_axes_are_refused() -> None:
    with pytest.raises(parsolve.SpecError, match="not an axis"):

        @parsolve.term()
        def wrong(p: Any, *, tensor: Any) -> Any:
            return tensor


def test_a_function_without_an_instance_is_refused() -> None:
    with pytest.raises(parsolve.SpecError, match="first parameter"):

        @parsolve.rule("no")
        def wrong(*, tp: Any) -> Any:
            return tp > 0


def test_at_the_same_points_a_function_is_called_once() -> None:
    asked = []

    @term(name="counted")
    def counted(p: Instance, *, tp: Any) -> Any:
        asked.append(tp)
        return 1.0 * tp

    p, q = (Problem("h100-sxm:1x8", "llama2-13b", seq_len=1024, gbs=8).instance(8, Splits((), ())) for _ in range(2))
    points = Points(p, {"tp": np.array([1, 2])})
    for _ in range(3):
        assert counted(p, Points.of(p, points)).tolist() == [1.0, 2.0]
    assert len(asked) == 1
    counted(q, points)  # another instance may answer otherwise
    counted(p, {"tp": np.array([1, 2])})
    assert len(asked) == 3
