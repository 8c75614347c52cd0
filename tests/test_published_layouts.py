"""Layer cuts that Megatron-LM users have published: accepted, and never faster than the best cut of the same shape."""

from __future__ import annotations

import pytest

from parsolve import Problem, check, evaluate, solve
from parsolve.api import check_result
from parsolve.from_megatron import read_megatron
from parsolve.presets import load_model_preset

DOCUMENTED = "layers_per_stage=3|2*29|0|0"
CASES = [
    # the embedding and the output layer count as layers; memory holds with full recomputation, not with selective
    ("llama3.1-405b", "h100-sxm:2048x8", 8192, 2048, "tp=8,pp=8,vpp=8,layers_per_stage=1|2*62|1"),
    # the same, in 32 chunks of three
    ("qwen3-235b-a22b", "h100-sxm:32x8", 4096, 1024, "tp=2,pp=8,vpp=4,ep=32,etp=1,layers_per_stage=2|3*30|2"),
    # 61 layers on 16 ranks
    ("deepseek-v3", "h800-sxm:256x8", 4096, 15360, "tp=1,pp=16,ep=64,etp=1,layers_per_stage=4*15|1"),
    # Megatron-LM's documentation, Et*3|(tt|)*29,m|L
    ("deepseek-v3", "h800-sxm:256x8", 4096, 16384, f"tp=1,pp=16,vpp=2,ep=64,etp=1,{DOCUMENTED},mtp_apart=true"),
]


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "gbs", "axes"), CASES, ids=["405b", "qwen3", "deepseek", "documented"]
)
def test_published_layouts_are_accepted(model: str, cluster: str, seq_len: int, gbs: int, axes: str) -> None:
    problem = Problem(cluster, model, seq_len=seq_len, gbs=gbs)
    config = f"{axes},mbs=1,zero=1,recompute=full"
    assert check(problem, config) == []
    sizes = dict(part.split("=") for part in axes.split(","))
    best = solve(problem, top=1, pin={axis: sizes[axis] for axis in ("tp", "pp")})
    assert best.status == "optimal"
    assert best.best.estimate.step_time_s <= evaluate(problem, config).step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("version", ["0.17", "0.19"])
def test_the_documented_layout_reads_as_it_is_written(version: str) -> None:
    """Multi-token prediction has a stage of its own there."""
    problem = Problem("h800-sxm:256x8", "deepseek-v3", seq_len=4096, gbs=16384, framework_version=version)
    config = f"tp=1,pp=16,vpp=2,ep=64,etp=1,{DOCUMENTED},mtp_apart=true,mbs=1,zero=1,recompute=full"
    line = check_result(problem, config).plans[0].args("megatron")
    documented = line.replace("'Et*3|(t*2|)*29m|L'", "'Et*3|(tt|)*29,m|L'")
    assert documented != line and "--mtp-num-layers 1" in line
    today = read_megatron(documented, problem.cluster, None, problem.version)
    again = Problem(problem.cluster, today.model or "", **{**today.fields, "framework_version": version})
    assert again.mtp_layers == 1 and not today.violations and check(again, today.config) == []
    assert evaluate(again, today.config).step_time_s == pytest.approx(evaluate(problem, config).step_time_s, rel=1e-9)
    assert not today.notes


@pytest.mark.parametrize("layers", [43, 62, 78])
def test_models_whose_layers_no_pipeline_divides(layers: int) -> None:
    """The best plan has unequal stages, is proven over all cuts, and holds every rule."""
    shape = load_model_preset("qwen3-235b-a22b").model_copy(update={"num_layers": layers})
    problem = Problem("h100-sxm:16x8", shape, seq_len=4096, gbs=512)
    listed, anywhere = (solve(problem, top=1, cuts=cuts, min={"pp": 4}) for cuts in ("listed", "any"))
    assert anywhere.status == "optimal"
    best = anywhere.best
    assert len({size for rank in best.config.layers_per_stage for size in rank}) > 1
    assert check(problem, best.config) == []
    assert best.estimate.step_time_s <= listed.best.estimate.step_time_s
    for plan in solve(problem, top=20, cuts="any", min={"pp": 4}).plans:
        assert all(isinstance(size, int) for rank in plan.config.layers_per_stage for size in rank)
        assert "--pipeline-model-parallel-size" in plan.args("megatron")
