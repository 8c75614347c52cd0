"""The figures of a validation as a readable table, and the worst runs with their breakdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parsolve.evaluation import estimate, instance_of
from parsolve.render.text import columns, seconds
from parsolve.validation.prediction import Prediction
from parsolve.validation.runs import Run, Runs

HEADER = (
    *("source", "runs", "MAPE %", "median %", "groups", "tau", "regret %", "max %"),
    *("OOM called legal %", "ok refused %", "peaks", "memory MAPE %"),
)


def percent(value: float | None) -> str:
    """A fraction in percent with one decimal, a dash where there is none."""
    return "-" if value is None else f"{100 * value:.1f}"


def row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    tau = figures["tau"]
    return (
        name,
        str(figures["n_time"]),
        percent(figures["mape"]),
        percent(figures["median_ape"]),
        str(figures["n_groups"]),
        "-" if tau is None else f"{tau:.2f}",
        percent(figures["regret_mean"]),
        percent(figures["regret_max"]),
        percent(figures["oom_missed"]),
        percent(figures["fit_refused"]),
        str(figures["n_memory"]),
        percent(figures["memory_mape"]),
    )


def table(summary: Mapping[str, Any]) -> str:
    """A line per source, then the mean over sources, coverage and what was skipped."""
    rows = [row(source, figures) for source, figures in summary["sources"].items()]
    macro = summary["macro"]
    rows.append(row("mean over sources", macro))
    text = columns(rows, HEADER, numbers=range(1, len(HEADER)))
    coverage = ", ".join(f"{use} {done} of {due}" for use, (done, due) in summary["coverage"].items())
    lines = [text, "", f"covered: {coverage}"]
    lines += [f"skipped: {number} x {reason}" for reason, number in summary["skipped"].items()]
    return "\n".join(lines)


def worst(runs: Runs, prediction: Prediction, number: int) -> list[dict[str, Any]]:
    """The runs whose step time is furthest off, with the terms of the prediction in s."""
    timed = [i for i, run in enumerate(runs.runs) if run.step_s and "time" in run.uses]
    off = {i: float(np.log(prediction.step_s[i] / (runs.runs[i].step_s or 1.0))) for i in timed}
    chosen = sorted(timed, key=lambda i: -abs(off[i]))[:number]
    return [_explained(runs.runs[i], float(prediction.step_s[i])) for i in chosen]


def _explained(run: Run, predicted: float) -> dict[str, Any]:
    p = instance_of(run.problem, run.config)
    shown = estimate(p, run.config)
    return {
        "row_id": run.row_id,
        "group_id": run.group,
        "config": run.config.to_json(),
        "profile": run.problem.profile.name,
        "measured_s": run.step_s,
        "predicted_s": predicted,
        "error": predicted / (run.step_s or np.nan) - 1.0,
        "terms_s": shown.terms_s,
        "hidden_s": shown.hidden_s,
        "assumptions": list(run.assumptions),
    }


def worst_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The worst runs, each on two lines."""
    lines = []
    for item in rows:
        config = item["config"]
        axes = " ".join(
            f"{name}={config[name]}" for name in ("tp", "pp", "vpp", "cp", "ep", "dp", "zero", "mbs", "grad_acc")
        )
        terms = sorted(item["terms_s"].items(), key=lambda entry: -entry[1])
        parts = ", ".join(f"{name} {seconds(amount)}" for name, amount in terms if amount > 0.005 * item["predicted_s"])
        measured, predicted = seconds(item["measured_s"]), seconds(item["predicted_s"])
        lines.append(f"{100 * item['error']:+6.1f} %  {item['row_id']}  {axes}  recompute={config['recompute']}")
        lines.append(f"          measured {measured}, predicted {predicted}: {parts}")
    return "\n".join(lines)
