"""A picture of predicted against measured step times, a colour per source."""

from __future__ import annotations

from pathlib import Path

from parsolve.errors import SpecError
from parsolve.render import picture
from parsolve.validation.prediction import Prediction
from parsolve.validation.runs import Runs


def plot(runs: Runs, prediction: Prediction, path: Path) -> None:
    """Write the picture; the format follows the file's ending (png, svg, pdf).

    Raises
    ------
    SpecError: matplotlib is not installed, nothing was timed, or the file cannot be written.
    """
    pyplot = picture.pyplot()
    points: dict[str, list[tuple[float, float]]] = {}
    for run, predicted in zip(runs.runs, prediction.step_s, strict=True):
        if run.step_s and "time" in run.uses:
            points.setdefault(run.source, []).append((run.step_s, float(predicted)))
    if not points:
        raise SpecError("no run has a step time", "--plot")
    figure, axes = pyplot.subplots(figsize=(8, 7))
    every = [value for pairs in points.values() for pair in pairs for value in pair]
    ends = [min(every) * 0.8, max(every) * 1.25]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.9, 1.1):
        axes.plot(ends, [end * factor for end in ends], color="grey", linewidth=0.5, linestyle="--")
    markers = "os^vD<>Pph*X"
    for index, (source, pairs) in enumerate(sorted(points.items())):
        measured, predicted_s = zip(*pairs, strict=True)
        axes.scatter(measured, predicted_s, s=12, marker=markers[index % len(markers)], label=source, alpha=0.7)
    axes.set(xscale="log", yscale="log", xlabel="measured step time, s", ylabel="predicted step time, s")
    axes.legend(fontsize=6)
    picture.save(figure, path)
