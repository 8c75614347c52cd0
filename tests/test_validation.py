"""Reading runs, predicting them and the figures made of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from parsolve.commands.validate import command as validate_command
from parsolve.evaluation import estimate, instance_for, stage_memories
from parsolve.validation import predict, read_runs, summarise
from parsolve.validation.cells import Unreadable, moe_layers, nics
from parsolve.validation.metrics import kendall_tau, regret

SHARED = Path(__file__).parents[2] / "shared" / "measured" / "calibration.csv"
ROW = {
    "num_layers": "16",
    "hidden": "2048",
    "num_heads": "16",
    "seq_len": "2048",
    "gpu": "A100-80GB-SXM",
    "num_gpus": "16",
    "tp": "2",
    "pp": "2",
    "mbs": "2",
    "gbs_sequences": "64",
    "step_time_s": "1.5",
    "software_family": "megatron",
}


def rows(*changes: dict[str, str]) -> list[dict[str, str]]:
    return [{**ROW, "row_id": str(i), **change} for i, change in enumerate(changes)]


def test_a_short_row_is_completed_and_its_assumptions_are_listed() -> None:
    (run,) = read_runs(rows({})).runs
    assert (run.config.dp, run.config.grad_acc, run.config.zero) == (4, 8, 0)
    assert run.problem.model.vocab_size == 51200
    assert run.problem.model.ffn_size == 8192
    assert set(run.assumptions) >= {"vocab 51200", "precision bf16", "attention_kernel flash", "zero 0"}
    assert run.uses == {"time", "rank"}


def test_megatron_lm_of_2022_passed_slices_between_stages() -> None:
    version = [{"framework": "Megatron-LM", "framework_version": year} for year in ("2022-05", "mcore r0.8.0")]
    old, new = read_runs(rows(*version)).runs
    assert old.problem.workload.sliced_transfers and not new.problem.workload.sliced_transfers
    assert any("slices" in line for line in old.assumptions)


def test_rates_become_step_times() -> None:
    (run,) = read_runs(rows({"step_time_s": "", "tokens_per_s_per_gpu": "4096"})).runs
    assert run.step_s == pytest.approx(64 * 2048 / (16 * 4096))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mbs": ""}, "mbs is not stated"),
        ({"num_heads": "x"}, "num_heads is not a number"),
        ({"tp": "3"}, "tp*pp*cp does not divide"),
        ({"gbs_sequences": "7"}, "neither grad_acc"),
        ({"gpu": "abacus"}, "abacus"),
        ({"precision": "int4"}, "precision int4"),
        ({"pp": "8", "vpp": "8", "tp": "1"}, "more pipeline chunks"),
    ],
)
def test_unreadable_rows_are_counted_with_their_reason(change: dict[str, str], reason: str) -> None:
    table = read_runs(rows({}, change))
    assert len(table.runs) == 1
    (skipped,) = table.reasons()
    assert reason in skipped
    summary = summarise(table, predict(table.runs))
    assert summary["coverage"]["time"] == [1, 1 if "mbs" in change else 2]
    assert summary["skipped"] == {skipped: 1}


def test_where_keeps_rows_by_number_or_text() -> None:
    table = read_runs(rows({"pp": "1.0"}, {"pp": "2"}, {"tp": "1"}), where={"pp": "1"})
    assert [run.row_id for run in table.runs] == ["0"]


def test_predictions_are_the_evaluators_own() -> None:
    runs = read_runs(rows({}, {"tp": "4"}, {"pp": "4", "vpp": "2"}, {"recompute": "full"}, {"mbs": "4"})).runs
    prediction = predict(runs)
    for run, step, memory in zip(runs, prediction.step_s, prediction.memory_bytes, strict=True):
        p = instance_for(run.problem, run.config.layers_per_stage, run.config.gbs)
        shown = estimate(p, run.config)
        assert step == pytest.approx(shown.step_time_s, rel=1e-9)
        assert memory == pytest.approx(max(stage.total for stage in stage_memories(p, run.config)), rel=1e-9)


def test_meters_and_stages_see_their_part() -> None:
    meters = ("allocated", "reserved", "device")
    runs = read_runs(rows(*({"memory_meter": m, "peak_mem_gb": "10"} for m in meters))).runs
    allocated, reserved, device = predict(runs).metered_bytes
    assert allocated < reserved < device
    p = instance_for(runs[0].problem, runs[0].config.layers_per_stage, runs[0].config.gbs)
    assert device - reserved == pytest.approx(p.profile.outside_bytes)
    last, worst = predict(
        read_runs(
            rows({"memory_stage": "last", "peak_mem_gb": "1"}, {"memory_stage": "worst", "peak_mem_gb": "1"})
        ).runs
    ).metered_bytes
    assert last <= worst


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("NVLink intra, 4x Omni-Path 100Gb/s per node", (4, 100.0)),
        ("800 Gb/s IB per node, NVLink intra", (1, 800.0)),
        ("NVLink intra, 400Gb/s RDMA per GPU", (8, 400.0)),
        ("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s", (8, 400.0)),
        ("NVLINK Gen4 900 GB/s", None),
        ("", None),
    ],
)
def test_fabric(text: str, found: tuple[int, float] | None) -> None:
    assert nics(text, 8) == found


def test_moe_patterns() -> None:
    assert moe_layers("1", 4) == ()
    assert moe_layers("first2dense", 4) == (0, 1)
    assert moe_layers("2", 4) == (1, 3)
    assert moe_layers("([0]*1+[1]*3)", 4) == (0,)
    with pytest.raises(Unreadable):
        moe_layers("([0]*1+[1]*2)", 4)


def test_ranking_figures() -> None:
    assert kendall_tau(np.array([1.0, 2, 3]), np.array([1.0, 2, 3])) == 1
    assert kendall_tau(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == -1
    assert regret(np.array([1.0, 2]), np.array([3.0, 2])) == pytest.approx(0.5)


def test_summary_of_out_of_memory_and_time() -> None:
    small, large = {"outcome": "oom"}, {"outcome": "ok", "hidden": "16384", "num_layers": "96", "tp": "1", "pp": "1"}
    table = read_runs(rows({"outcome": "ok"}, small, large))
    figures = summarise(table, predict(table.runs))["sources"]["own"]
    assert figures["n_time"] == 3
    assert figures["oom_missed"] == 1.0
    assert figures["fit_refused"] == 0.5


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    names = list(ROW)
    path.write_text(",".join(names) + "\n" + ",".join(ROW[n] for n in names) + "\n", encoding="utf-8")
    plot = tmp_path / "runs.png"
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(
        validate_command, [str(path), "-q", "--json", "--worst", "1", "--plot", str(plot)], standalone_mode=False
    )
    assert result.exception is None, result.output
    data = json.loads(result.stdout)
    assert data["sources"]["own"]["n_time"] == 1
    assert data["worst"][0]["measured_s"] == 1.5
    assert plot.stat().st_size > 0
    text = CliRunner().invoke(validate_command, [str(path), "-q", "--worst", "1"], standalone_mode=False).stdout
    assert "mean over sources" in text
    assert "measured 1.5" in text


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    if not SHARED.exists():
        pytest.skip("the published measurements are not here")
    table = read_runs(SHARED)
    return summarise(table, predict(table.runs))


def test_every_due_row_is_covered(published: dict[str, Any]) -> None:
    for use, (done, due) in published["coverage"].items():
        assert done == due, use


def test_published_runs_are_close(published: dict[str, Any]) -> None:
    """Coarse guards in sample; docs/accuracy.md has the figures."""
    assert published["macro"]["median_ape"] < 0.10
    assert published["macro"]["mape"] < 0.13
    assert published["macro"]["tau"] > 0.7
    assert published["sources"]["aleph_alpha_2023"]["oom_missed"] <= 0.05
