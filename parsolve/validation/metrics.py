"""Errors by source: step time, ranking inside groups, out-of-memory judgements, memory; then the mean over sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parsolve.functions import Array
from parsolve.validation.prediction import Prediction
from parsolve.validation.runs import Run, Runs

SPREAD = 1.1
"""Groups whose slowest and fastest layout differ by less are left out of Kendall's tau: their order is noise."""
ENOUGH = 10
"""A source enters the mean of a figure from this many rows of the kind."""
TIME_KEYS = ("mape", "median_ape", "tau", "regret_mean", "regret_median", "regret_max")


def kendall_tau(a: Array, b: Array) -> float:
    """(concordant - discordant) / sqrt of the untied pairs of either (tau-b); 0 when all are tied."""
    i, j = np.triu_indices(len(a), 1)
    x, y = np.sign(a[i] - a[j]), np.sign(b[i] - b[j])
    scale = np.sqrt(float((x != 0).sum()) * float((y != 0).sum()))
    return float((x * y).sum() / scale) if scale else 0.0


def regret(predicted: Array, measured: Array) -> float:
    """Measured time of the layout predicted fastest over the measured best, less 1."""
    return float(measured[int(np.argmin(predicted))] / measured.min() - 1.0)


def summarise(runs: Runs, prediction: Prediction) -> dict[str, Any]:
    """The figures by source, the coverage, the mean over sources and the reasons for skipped rows."""
    by_source: dict[str, list[int]] = {}
    for index, run in enumerate(runs.runs):
        by_source.setdefault(run.source, []).append(index)
    sources = {
        source: _source([runs.runs[i] for i in at], np.array(at), prediction)
        for source, at in sorted(by_source.items())
    }
    return {
        "sources": sources,
        "coverage": _coverage(runs),
        "macro": _macro(sources),
        "skipped": runs.reasons(),
    }


def _coverage(runs: Runs) -> dict[str, list[int]]:
    result = {}
    for use in ("time", "oom", "memory"):
        done = sum(use in run.uses for run in runs.runs)
        missed = sum(use in uses for uses, _ in runs.skipped)
        result[use] = [done, done + missed]
    return result


def _source(runs: Sequence[Run], at: Array, prediction: Prediction) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    timed = np.array(["time" in run.uses and bool(run.step_s) for run in runs])
    measured = np.array([run.step_s or np.nan for run in runs])
    step = prediction.step_s[at]
    error = np.abs(step / measured - 1.0)[timed]
    figures["n_time"] = int(timed.sum())
    figures["mape"] = float(error.mean()) if len(error) else None
    figures["median_ape"] = float(np.median(error)) if len(error) else None
    ranked = np.array(["rank" in run.uses for run in runs]) & timed
    figures |= _ranking([run.group for run in runs], ranked, step, measured)
    judged = np.array(["oom" in run.uses for run in runs])
    oom = np.array([run.outcome == "oom" for run in runs]) & judged
    fit = np.array([run.outcome == "ok" for run in runs]) & judged
    legal = prediction.memory_bytes[at] <= prediction.usable_bytes[at]
    figures["n_oom"] = int(oom.sum())
    figures["oom_missed"] = float(legal[oom].mean()) if oom.any() else None
    figures["n_fit"] = int(fit.sum())
    figures["fit_refused"] = float((~legal)[fit].mean()) if fit.any() else None
    weighed = np.array(["memory" in run.uses and bool(run.memory_bytes) for run in runs])
    figures["n_memory"] = int(weighed.sum())
    peak = np.array([run.memory_bytes or np.nan for run in runs])
    off = np.abs(prediction.metered_bytes[at] / peak - 1.0)[weighed]
    figures["memory_mape"] = float(off.mean()) if len(off) else None
    meters = sorted({run.meter for run, use in zip(runs, weighed, strict=True) if use})
    figures["memory_meter"] = "|".join(meters)
    return figures


def _ranking(groups: Sequence[str], ranked: Array, step: Array, measured: Array) -> dict[str, Any]:
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if ranked[index]:
            members.setdefault(group, []).append(index)
    taus, regrets = [], []
    for at in members.values():
        if len(at) < 3:
            continue
        predicted, truth = step[at], measured[at]
        regrets.append(regret(predicted, truth))
        if truth.max() / truth.min() >= SPREAD:
            taus.append(kendall_tau(predicted, truth))
    return {
        "n_groups": len(regrets),
        "tau": float(np.mean(taus)) if taus else None,
        "regret_mean": float(np.mean(regrets)) if regrets else None,
        "regret_median": float(np.median(regrets)) if regrets else None,
        "regret_max": float(np.max(regrets)) if regrets else None,
    }


def _macro(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Plain mean over the sources with enough rows of the kind."""

    def mean(key: str, rows: str, known_meter: bool = False) -> float | None:
        values = [
            figures[key]
            for figures in sources.values()
            if figures[rows] >= ENOUGH
            and figures[key] is not None
            and not (known_meter and "unknown" in figures["memory_meter"])
        ]
        return float(np.mean(values)) if values else None

    macro = {key: mean(key, "n_time") for key in TIME_KEYS}
    macro["oom_missed"] = mean("oom_missed", "n_oom")
    macro["fit_refused"] = mean("fit_refused", "n_fit")
    macro["memory_mape"] = mean("memory_mape", "n_memory", known_meter=True)
    for key, rows in (("n_time", "n_time"), ("n_oom", "n_oom"), ("n_fit", "n_fit"), ("n_memory", "n_memory")):
        macro[key] = sum(figures[rows] >= ENOUGH for figures in sources.values())
    macro["n_groups"] = sum(figures["n_groups"] > 0 for figures in sources.values())
    return macro
