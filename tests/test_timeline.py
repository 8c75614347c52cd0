"""The timeline of a pipeline schedule, the Chrome trace made of it, and the picture of the stages."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from simulate import simulate

from parsolve import Problem
from parsolve.api import check, check_result
from parsolve.cli import main
from parsolve.errors import NotExpressibleError
from parsolve.objectives.schedule import Shape
from parsolve.objectives.schedule_length import makespan, timeline
from parsolve.problem import replace_workload
from parsolve.render.trace import chrome_trace

PLACE = ("h100-sxm:2x8", "llama3.1-8b", "--seq-len", "4096", "--gbs", "64")


def inputs_of(stage: int, back: bool, stages: int) -> tuple[int, bool] | None:
    """The pass of the same microbatch that must have ended before."""
    if not back:
        return (stage - 1, False) if stage else None
    return (stage + 1, True) if stage < stages - 1 else (stage, False)


def shapes(seed: int) -> tuple[Shape, Any, Any, float]:
    rng = random.Random(seed)
    pp, vpp = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 1, 2, 3])
    kind = rng.choice(["1f1b", "1f1b", "gpipe"])
    vpp = 1 if pp == 1 or kind == "gpipe" else vpp
    m = pp * rng.randint(1, 4) if vpp > 1 else rng.randint(1, 12)
    forward, backward = (np.array([rng.uniform(0.1, 3) for _ in range(pp * vpp)]) for _ in range(2))
    return Shape(pp, vpp, m, kind), forward, backward, rng.choice([0.0, 0.3])


@pytest.mark.parametrize("seed", range(40))
def test_passes_follow_their_inputs_and_never_overlap(seed: int) -> None:
    shape, forward, backward, delay = shapes(seed)
    passes = timeline(shape, forward, backward, delay)
    stages, tolerance = shape.pp * shape.vpp, 1e-9
    assert len(passes.end) == 2 * stages * shape.microbatches
    at = {
        (stage, microbatch, back): (start, end)
        for _, stage, microbatch, back, start, end, _ in zip(*(c.tolist() for c in passes), strict=True)
    }
    assert len(at) == len(passes.end)
    for (stage, microbatch, back), (start, end) in at.items():
        assert end - start == pytest.approx((backward if back else forward)[stage])
        before = inputs_of(stage, back, stages)
        if before is not None:
            lag = delay if before[0] != stage and shape.pp > 1 else 0.0
            assert at[(before[0], microbatch, before[1])][1] + lag <= start + tolerance
    for rank in range(shape.pp):
        here = passes.rank == rank
        assert np.all(passes.stage[here] % shape.pp == rank)
        assert np.all(passes.start[here][1:] >= passes.end[here][:-1])
    assert passes.start.min() >= -tolerance
    assert passes.end.max() == makespan(shape, forward, backward, delay)
    if delay == 0 and shape.kind == "1f1b":
        times = [x.reshape(shape.vpp, shape.pp).T.tolist() for x in (forward, backward)]
        assert passes.end.max() == pytest.approx(simulate(times[0], times[1], shape.microbatches)[0])


CONFIGS = ["pp=4,vpp=2,tp=2", "pp=4,tp=2,layers_per_stage=7|9|9|7", "pp=2,tp=2", "pp=1,tp=4"]


@pytest.mark.parametrize("text", CONFIGS)
def test_a_trace_is_the_whole_schedule(text: str) -> None:
    plan = check_result(Problem("h100-sxm:2x8", "llama3.1-8b", seq_len=4096, gbs=64), f"{text},mbs=1,zero=1").plans[0]
    config = plan.config
    trace = json.loads(chrome_trace(plan))
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(passes) == 2 * config.grad_acc * config.pp * config.vpp
    assert len({(event["pid"], event["name"]) for event in passes}) == len(passes)
    ranks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    ends: dict[tuple[int, int, bool], tuple[float, float]] = {}
    for event in passes:
        args, span = event["args"], (event["ts"], event["ts"] + event["dur"])
        back = event["name"].startswith("B")
        assert event["name"] == f"{'B' if back else 'F'} mb{args['microbatch']} chunk{args['chunk']}"
        assert args["layers"] == config.layers_per_stage[event["pid"]][args["chunk"]]
        ranks[event["pid"]].append(span)
        ends[(args["stage"], args["microbatch"], back)] = span
    assert sorted(ranks) == list(range(config.pp))
    for spans in ranks.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(spans))  # 1 ns
    for (stage, microbatch, back), (start, _) in ends.items():
        before = inputs_of(stage, back, config.pp * config.vpp)
        assert before is None or ends[(before[0], microbatch, before[1])][1] <= start + 1e-3
    pipeline = max(end for spans in ranks.values() for _, end in spans) / 1e6
    beside = sum(plan.estimate.terms_s.get(name, 0.0) for name in ("dp_comm", "gather_comm", "optimizer", "fixed"))
    assert pipeline == pytest.approx(plan.estimate.step_time_s - beside)
    assert trace["otherData"]["pipeline_s"] == pytest.approx(pipeline)


@pytest.mark.parametrize("framework", ["torchtitan", "generic"])
def test_gpipe_takes_all_forward_passes_first(framework: str) -> None:
    given = Problem("h100-sxm:2x8", "llama3.1-8b", seq_len=2048, gbs=64, framework=framework, schedule="gpipe")
    text = f"pp=4,tp=4,mbs=2,zero={int(framework == 'torchtitan')},recompute=full"
    plan = check_result(given, text).plans[0]
    other = check_result(replace_workload(given, schedule="1f1b"), text).plans[0]
    passes, m = plan.timeline(), plan.config.grad_acc
    for rank in range(4):
        here = passes.rank == rank
        assert passes.is_backward[here].tolist() == [False] * m + [True] * m
    held = [stage.parts["activations"] for stage in plan.stages]
    assert [stage.rank for stage in plan.stages] == [0, 1, 2, 3]
    assert held[1] == held[2] and held[1] > 2 * other.stages[1].parts["activations"]
    assert plan.stages[3].parts["logits"] == m * other.stages[3].parts["logits"]
    assert passes.end.max() == pytest.approx(other.timeline().end.max(), rel=0.2)
    assert ("--parallelism.pipeline-parallel-schedule GPipe" in plan.args("torchtitan")) or framework == "generic"
    with pytest.raises(NotExpressibleError, match="1F1B only"):
        plan.args("megatron")


def test_gpipe_without_a_pipeline_is_plain_accumulation() -> None:
    plain = Problem("h100-sxm:1x8", "llama3.1-8b", seq_len=2048, gbs=64, framework="torchtitan")
    text = "tp=8,mbs=2,zero=0,recompute=full"
    plans = [check_result(replace_workload(plain, schedule=s), text).plans[0] for s in ("1f1b", "gpipe")]
    assert plans[0].estimate == plans[1].estimate
    assert plans[0].timeline().is_backward.tolist() == plans[1].timeline().is_backward.tolist()


@pytest.mark.parametrize(
    ("framework", "text", "rule"),
    [
        ("megatron", "pp=2", "gpipe_launcher"),
        ("nemo", "pp=2", "gpipe_launcher"),
        ("deepspeed", "pp=2", "gpipe_launcher"),
        ("torchtitan", "pp=2,vpp=2", "gpipe_one_chunk"),
    ],
)
def test_gpipe_only_where_the_launcher_has_it(framework: str, text: str, rule: str) -> None:
    given = Problem("h100-sxm:2x8", "llama3.1-8b", seq_len=4096, gbs=64, framework=framework, schedule="gpipe")
    assert rule in {v.rule for v in check(given, text)}
    assert rule not in {v.rule for v in check(replace_workload(given, schedule="1f1b"), text)}
    assert rule not in {v.rule for v in check(given, "pp=1")}


def run(*words: object) -> Any:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize("command", [("check", "--config", "pp=2,tp=2,zero=1"), ("solve", "--top", "1")])
def test_files_are_written_beside_the_answer(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *rest = command
    plain = run(name, *PLACE, *rest, "-q", "-f", "csv")
    trace = tmp_path / "step.json"
    answer = run(name, *PLACE, *rest, "-q", "-f", "csv", "--trace", trace)
    assert answer.exit_code == 0 and answer.stdout == plain.stdout
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_of_the_stages(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"stages.{ending}"
    assert run("check", *PLACE, "--config", "pp=4,tp=2,zero=1", "-q", "--plot", picture).exit_code == 0
    assert picture.stat().st_size > 1000
    if ending == "svg":
        assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("option", ["--trace", "--plot"])
def test_a_file_that_cannot_be_written_is_refused(option: str, tmp_path: Path) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    for path in (tmp_path, tmp_path / "none" / "x.png"):
        answer = run("check", *PLACE, "--config", "pp=2", option, path)
        assert answer.exit_code == 2 and option in answer.stderr


def test_an_unknown_picture_format_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    answer = run("check", *PLACE, "--config", "pp=2,zero=1", "--plot", tmp_path / "x.nonsense")
    assert answer.exit_code == 2 and "--plot" in answer.stderr


def test_without_a_plan_nothing_is_written(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    place = ("h100-sxm:1x2", "llama2-70b", "--seq-len", "4096", "--gbs", "64")
    answer = run("solve", *place, "--trace", trace)
    assert answer.exit_code == 1 and not trace.exists() and "--trace writes nothing" in answer.stderr
