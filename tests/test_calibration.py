"""Fitting constants: known ones are found again, too few runs are refused, what is not seen stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from parsolve.calibration import FITTED, Fit, calibrate, fold_of
from parsolve.commands.calibrate import command as calibrate_command
from parsolve.errors import SpecError
from parsolve.profiles import load_profile
from parsolve.validation import predict, read_runs
from parsolve.validation.runs import Run

BASE = {"num_layers": "32", "hidden": "4096", "num_heads": "32", "seq_len": "4096", "gpu": "A100-80GB-SXM"}
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 2), (1, 2, 1), (2, 2, 2), (8, 1, 4), (1, 4, 1), (4, 2, 1)]


def rows(times: list[float] | None = None) -> list[dict[str, str]]:
    made = []
    for i, (tp, pp, mbs) in enumerate(LAYOUTS):
        row = {**BASE, "num_gpus": "8", "gbs_sequences": "64", "software_family": "megatron", "row_id": str(i)}
        row |= {"tp": str(tp), "pp": str(pp), "mbs": str(mbs), "step_time_s": str(times[i] if times else 1.0)}
        made.append(row)
    return made


def measured_with(**changes: float) -> list[Run]:
    """Runs whose times are those of a changed default profile."""
    blank = read_runs(rows(), profile="default").runs
    truth = load_profile("default").model_copy(update=changes)
    times = predict(blank, {"default": truth}).step_s
    return read_runs(rows([float(t) for t in times]), profile="default").runs


def test_a_known_change_is_found() -> None:
    result = calibrate(measured_with(gemm_efficiency=0.6))
    assert result.profile.gemm_efficiency == pytest.approx(0.6, abs=0.03)
    assert result.before > 0.1
    assert result.after < 0.03
    assert "fp8" not in result.text
    assert "low_precision_gemm_efficiency" in result.undetermined
    assert result.profile.low_precision_gemm_efficiency == load_profile("default").low_precision_gemm_efficiency


def test_nothing_is_fitted_where_nothing_is_wrong() -> None:
    result = calibrate(measured_with())
    assert not result.fitted
    assert result.after <= result.before
    assert "nothing was fitted" in " ".join(result.report())


def test_three_runs_are_enough_and_two_are_not() -> None:
    runs = measured_with(gemm_efficiency=0.55)
    assert calibrate(runs[:3]).after < calibrate(runs[:3]).before
    with pytest.raises(SpecError, match="at least 3"):
        calibrate(runs[:2])


def test_stacks_are_not_mixed() -> None:
    mixed = [*read_runs(rows()).runs, *read_runs([{**rows()[0], "gpu": "H100-80GB-SXM"}]).runs]
    with pytest.raises(SpecError, match="--where"):
        calibrate(mixed)


def test_constants_stay_within_their_range() -> None:
    profile = load_profile("default")
    for constant in FITTED:
        value = getattr(profile, constant.name)
        assert constant.low <= value <= constant.high, constant.name
        assert constant.outer(constant.inner(value)) == pytest.approx(value)
    runs = measured_with(gemm_efficiency=0.05)
    fit = Fit(runs, profile, FITTED)
    solution = fit.solve(rounds=2)
    assert (solution >= fit.low - 1e-6).all()
    assert (solution <= fit.high + 1e-6).all()


def test_folds_keep_groups_together() -> None:
    runs = read_runs([{**row, "group_id": str(i // 2)} for i, row in enumerate(rows())]).runs
    folds = fold_of(runs, 3)
    assert (folds[::2] == folds[1::2]).all()
    assert len(np.unique(folds)) == 3


def test_command_writes_a_profile_that_loads(tmp_path: Path) -> None:
    runs = measured_with(gemm_efficiency=0.6)
    table = tmp_path / "runs.csv"
    names = list(runs[0].row)
    lines = [",".join(names), *(",".join(run.row[n] for n in names) for run in runs)]
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    target = tmp_path / "own.toml"
    result = CliRunner().invoke(
        calibrate_command, [str(table), "-o", str(target), "--profile", "default"], standalone_mode=False
    )
    assert result.exception is None, result.output
    assert load_profile(target).gemm_efficiency == pytest.approx(0.6, abs=0.03)
    assert "before" in result.stderr


def test_a_table_of_variables_is_predicted_row_by_row() -> None:
    runs = measured_with()
    fit = Fit(runs, load_profile("nanotron-hopper"), FITTED)
    table = np.vstack((fit.prior, np.clip(fit.prior + 0.1 * fit.widths, fit.low, fit.high)))
    together = fit.predicted(table)
    assert together.shape == (2, len(runs))
    for row, variables in zip(together, table, strict=True):
        np.testing.assert_allclose(row, fit.predicted(variables), rtol=1e-12)


def test_runs_keep_the_constants_of_their_own_profile() -> None:
    runs = measured_with(gemm_efficiency=0.6)
    free = Fit(runs, load_profile("default"), FITTED)
    held = Fit(runs, load_profile("default"), FITTED, own={"default": {"gemm_efficiency": 0.6}})
    np.testing.assert_allclose(held.errors(held.prior), 0.0, atol=1e-9)
    assert np.abs(free.errors(free.prior)).max() > 0.05
